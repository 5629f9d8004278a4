"""Where a node stands in a file, and what may be written there: what fixes ask before an edit."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from ampwise_lint.findings import Edit
from ampwise_lint.source.nodes import span
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def wrap(first: ast.stmt, last: ast.stmt, header: str) -> Edit:
    """Put the statements of one block, from the first to the last, below a header."""
    line, column, _, _ = span(first)
    _, _, end_line, end_column = span(last)
    return Edit("wrap", line, column, end_line, end_column, header, first)


def grouped(module: Module, node: ast.expr) -> str:
    """An expression as an operand: in parentheses where an operator could tear it apart."""
    text = module.text_of(node)
    return text if isinstance(node, ATOMS) else f"({text})"


def functions_of(module: Module, node: ast.AST) -> list[Functions]:
    """The functions a node stands in, innermost first."""
    return [each for each in outward(module, node) if isinstance(each, Functions)]


def is_inside(module: Module, node: ast.AST, outer: ast.AST) -> bool:
    """Whether a node stands in another one, in the same function."""
    for each in outward(module, node):
        if each is outer:
            return True
        if isinstance(each, Functions):
            return False
    return False


def class_of(module: Module, node: ast.AST) -> ast.ClassDef | None:
    """The class a node stands in."""
    return next((e for e in outward(module, node) if isinstance(e, ast.ClassDef)), None)


def outward(module: Module, node: ast.AST) -> Iterator[ast.AST]:
    """What a node stands in, from the inside."""
    around = module.parents.get(id(node))
    while around is not None:
        yield around
        around = module.parents.get(id(around))


def scope_of(module: Module, node: ast.AST) -> ast.AST:
    """The function whose names a node sees first, or the module."""
    return next(iter(functions_of(module, node)), module.tree)


def block_of(module: Module, statement: ast.stmt) -> list[ast.stmt]:
    """The statements among which one stands."""
    around = module.parents.get(id(statement))
    for name in ("body", "orelse", "finalbody"):
        block: object = getattr(around, name, None)
        if isinstance(block, list) and any(each is statement for each in block):
            return block
    return [statement]


def alone(module: Module, node: ast.AST) -> ast.Expr | None:
    """The statement that is an expression and nothing else, in lines of its own; none if not."""
    statement = module.statement_of(node)
    if not isinstance(statement, ast.Expr) or statement.value is not node:
        return None
    return statement if has_own_lines(module, statement) else None


def has_own_lines(module: Module, statement: ast.stmt) -> bool:
    """Whether a statement shares no line with another, or with the header of its block."""
    first, column, last, end = span(statement)
    lines = module.source.lines
    before = lines[first - 1].encode()[:column]
    behind = lines[last - 1].encode()[end:].strip()
    return not before.strip() and (not behind or behind.startswith(b"#"))


def has_comment(module: Module, statement: ast.stmt) -> bool:
    """Whether a comment belongs to a statement: in its lines, or in the line above."""
    first, _, last, _ = span(statement)
    lines = module.source.lines
    above = lines[first - 2].strip() if first > 1 else ""
    return above.startswith("#") or any("#" in line for line in lines[first - 1 : last])


def with_comment(module: Module, statement: ast.stmt) -> str:
    """A statement of one line, with the comment behind it; empty for others."""
    first, column, last, _ = span(statement)
    line = module.source.lines[first - 1].encode()[column:].decode(errors="replace")
    return line if first == last and ";" not in line else ""


def names(node: ast.AST) -> set[str]:
    """All names in some code."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def bound_in(scope: ast.AST) -> set[str]:
    """Names that a function (or the module) binds itself, parameters too."""
    found = {
        each.id
        for each in ast.walk(scope)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    if isinstance(scope, Functions):
        found |= {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
    return found


def names_bound_by(tree: ast.AST) -> set[str]:
    """Names that definitions, parameters and assignments bind anywhere in some code."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case _:
                pass
    return found


def is_type(module: Module, node: ast.AST) -> bool:
    """Whether an expression is a type in an annotation, or what ``isinstance`` asks for."""
    around, node = _type_around(module, node)
    match around:
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return kinds is node
        case _:
            return _is_annotation(around, node)


def is_never_read(module: Module, node: ast.AST) -> bool:
    """Whether an expression is an annotation that is not evaluated when the file runs."""
    around, node = _type_around(module, node)
    if not _is_annotation(around, node):
        return False
    if module.imports.names.get("annotations") == "__future__.annotations":
        return True
    is_local = isinstance(around, ast.AnnAssign) and isinstance(around.target, ast.Name)
    within = next((e for e in outward(module, around) if isinstance(e, SCOPES)), None)
    return is_local and isinstance(within, ast.FunctionDef | ast.AsyncFunctionDef)


SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _type_around(module: Module, node: ast.AST) -> tuple[ast.AST, ast.AST]:
    """What stands around a type, ``Scaler | None`` and ``list[Scaler]`` passed over, and in it."""
    around = module.parents[id(node)]
    while isinstance(around, ast.BinOp | ast.Subscript | ast.Tuple):
        node, around = around, module.parents[id(around)]
    return around, node


def _is_annotation(around: ast.AST, node: ast.AST) -> bool:
    match around:
        case ast.arg() | ast.AnnAssign():
            return around.annotation is node
        case ast.FunctionDef(returns=returns) | ast.AsyncFunctionDef(returns=returns):
            return returns is node
        case _:
            return False


def assignments(scope: ast.AST, name: str) -> list[ast.Assign | ast.AugAssign | ast.AnnAssign]:
    """Where a name (or ``self.name``) is assigned by itself, in a function or the module."""
    return [
        each
        for each in ast.walk(scope)
        if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and any(dotted(target) == name for target in _targets(each))
    ]


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def bound_to(module: Module, node: ast.AST) -> list[str]:
    """What something is bound to, also as an item of a tuple or a dict, or as an argument."""
    around, statement = module.parents.get(id(node)), module.statement_of(node)
    match around, statement:
        case ast.keyword(arg=str(name)), _:
            return [name]
        case ast.Dict(keys=keys, values=values), _:
            return _beside(keys, values, node)
        case ast.Tuple(elts=values), ast.Assign(targets=[ast.Tuple(elts=targets)]):
            return _beside(targets, values, node) if statement.value is around else []
        case _, ast.Assign(targets=targets):
            return [*map(dotted, targets)]
        case _:
            return []


def _beside(
    names: Sequence[ast.expr | None], values: Sequence[ast.expr], node: ast.AST
) -> list[str]:
    """The text of that name whose value is a node."""
    pairs = zip(names, values, strict=False)
    return [ast.unparse(name) for name, value in pairs if value is node and name is not None]


def stores(scope: ast.AST, name: str) -> int:
    """How often code binds a name, in whatever way."""
    return sum(
        isinstance(each, ast.Name | ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and dotted(each) == name
        for each in ast.walk(scope)
    )


def loads(scope: ast.AST, name: str) -> list[ast.expr]:
    """Where code reads a name (or ``self.name``)."""
    return [
        each
        for each in ast.walk(scope)
        if isinstance(each, ast.Name | ast.Attribute)
        and isinstance(each.ctx, ast.Load)
        and dotted(each) == name
    ]


def has_torch(module: Module) -> bool:
    """Whether the name ``torch`` is torch in this file."""
    return module.imports.names.get("torch") == "torch"


def in_reach(module: Module, node: ast.AST, at: ast.AST) -> bool:
    """Whether an expression means the same at another place of the file.

    There, the same function or the module has to bind its names; ``self`` has to be of one class.
    """
    here, there = functions_of(module, node), functions_of(module, at)
    if here[:1] == there[:1]:
        return True
    used = names(node)
    if "self" in used:
        if class_of(module, node) is not class_of(module, at):
            return False
        used.discard("self")
    local = {name for each in (*here, *there) for name in bound_in(each)}
    known = bound_in(module.tree) | set(module.imports.names) | set(dir(builtins))
    return not used & local and used <= known
