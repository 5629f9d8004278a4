"""One change to a file, with what it is called, and what it leaves behind: dead assignments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.site import Binding, Site
from ampwise.numerics.remedy.patches.source import Change, changed, dotted, same, walk
from ampwise_lint.base.words import joined

P = TypeVar("P")

_WEAK = (
    cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp,
    cst.Lambda, cst.NamedExpr, cst.Await, cst.Yield,
)  # fmt: skip
"""Expressions that need parentheses inside another one."""

_BINDS = (
    cst.BinaryOperation, cst.UnaryOperation, cst.Attribute, cst.Subscript, cst.Call, cst.Await,
    cst.ComparisonTarget, cst.Comparison,
)  # fmt: skip
"""Nodes whose parts are read with them first."""


@dataclass(frozen=True, eq=False)
class Edit:
    """Nodes of a file and what becomes of them.

    Attributes
    ----------
    what
        In a few words, for a list of fixes.
    why
        One sentence of what it changes in the numbers.
    parts, fewer
        Of how many parts it is that may be left out, and the same edit of some of them; None where
        it cannot be made of these.
    statements
        How many of the parts, the last ones, are statements of an island.
    """

    what: str
    why: str
    changes: Mapping[cst.CSTNode, Change]
    parts: int = 0
    fewer: Callable[[Collection[int]], Edit | None] | None = None
    statements: int = 0


def of_parts(parts: Sequence[P], made: Callable[[Sequence[P]], Edit | None]) -> Edit:
    """An edit that is made of parts, and can be made of some of them."""
    edit = made(parts)
    assert edit is not None

    def fewer(kept: Collection[int]) -> Edit | None:
        return made([each for number, each in enumerate(parts) if number in kept])

    return replace(edit, parts=len(parts), fewer=fewer)


def separable(
    what: str, why: str, changes: Mapping[cst.CSTNode, Change],
    together: Callable[[cst.CSTNode], object] = id,
) -> Edit:  # fmt: skip
    """An edit whose changes can be made without each other, but for those that belong together."""
    parts: dict[object, dict[cst.CSTNode, Change]] = {}
    for node, to in changes.items():
        parts.setdefault(together(node), {})[node] = to

    def made(some: Sequence[Mapping[cst.CSTNode, Change]]) -> Edit | None:
        kept = {node: to for each in some for node, to in each.items()}
        return Edit(what, why, kept) if kept else None

    return of_parts(list(parts.values()), made)


def enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression that can be a part of another, in parentheses where it needs them."""
    if isinstance(node, _WEAK) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def like(original: cst.BaseExpression, made: cst.BaseExpression) -> cst.BaseExpression:
    """A replacement with the parentheses of what it replaces: it may stand over several lines."""
    if original.lpar and not made.lpar:
        return made.with_changes(lpar=original.lpar, rpar=original.rpar)
    return made


def method(node: cst.BaseExpression, name: str, *args: cst.BaseExpression) -> cst.Call:
    """``node.name(*args)``."""
    return cst.Call(cst.Attribute(enclosed(node), cst.Name(name)), [cst.Arg(each) for each in args])


def cast_of(node: cst.CSTNode) -> cst.BaseExpression | None:
    """What an expression does nothing to but cast it to 16 bits; None for anything else."""
    match node:
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value=name)), args=args):
            to = name in ("to", "type") and len(args) == 1 and _is_a_format(args[0].value)
            is_cast = to or name == "type_as" or (name in ("half", "bfloat16") and not args)
            return value if is_cast else None
        case _:
            return None


def widened(site: Site, node: cst.BaseExpression) -> cst.BaseExpression:
    """``node.float()``; of a cast to another format, with the cast left out."""
    if (value := cast_of(node)) is not None:
        return value if site.kinds(value) == {"float32"} else method(value, "float")
    return method(node, "float")


def _is_a_format(node: cst.BaseExpression) -> bool:
    """Whether an expression is called a format: ``x.dtype``, ``dtype``, ``torch.float16``."""
    name = dotted(node).rpartition(".")[2]
    return name in (*HALF, "half", "dtype")


def replaced(
    site: Site, root: cst.BaseExpression, made: cst.BaseExpression, followed: Iterable[Binding] = ()
) -> dict[cst.CSTNode, Change]:
    """Changes that put an expression for another, and drop assignments that nobody needs then."""
    gone: list[cst.CSTNode] = [root]
    above = site.source.parents[root]
    loose = is_sum(above) or isinstance(above, cst.UnaryOperation)
    if isinstance(above, _BINDS) and not (loose and is_product(made)):
        made = enclosed(made)
    changes: dict[cst.CSTNode, Change] = {root: like(root, made)}
    left = list(dict.fromkeys(followed))
    while dead := next((each for each in left if _is_dead(site, each, gone)), None):
        left.remove(dead)
        assert dead.value is not None
        gone.append(dead.value)
    dropped = [each for each in dict.fromkeys(followed) if each not in left]
    for statement in dict.fromkeys(each.statement for each in dropped if each.statement):
        parts = [each for each in dropped if each.statement is statement]
        if (less := _without(statement, parts)) is not None:
            changes[statement] = less
    return changes | comments_moved(site, changes)


def merged(site: Site, edits: Sequence[Edit]) -> Edit | None:
    """Several changes of one kind as one; None where there are no several, or they overlap."""
    changes: dict[cst.CSTNode, Change] = {}
    for each in edits:
        if any(site.source.inside(new, old) or site.source.inside(old, new)
               for new in each.changes for old in changes):  # fmt: skip
            return None
        changes |= each.changes
    return Edit(edits[0].what, edits[0].why, changes) if len(edits) > 1 else None


def comments_moved(site: Site, changes: Mapping[cst.CSTNode, Change]) -> dict[cst.CSTNode, Change]:
    """What stands above a statement that goes, above the one that comes next."""
    moved: dict[cst.CSTNode, Change] = {}
    for block in walk(site.scope, cst.IndentedBlock):
        above: list[cst.EmptyLine] = []
        for each in block.body:
            lines = list(getattr(each, "leading_lines", ()))
            if isinstance(changes.get(each), cst.RemovalSentinel):
                above += [line for line in lines if line.comment is not None]
            elif above and hasattr(each, "leading_lines"):
                new = changed(each, changes)
                moved[each] = new.with_changes(leading_lines=[*above, *lines])
                above = []
    return moved


def said(statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
    """A statement without what only names something, or assigns it to itself; None for no rest."""
    match statement.body:
        case [cst.Expr(value=value)]:
            return None if dotted(value) else statement
        case [cst.Assign(targets=[_]) as assign]:
            pairs = _pairs(assign)
            kept = [pair for pair in pairs if not dotted(pair[1]) or not same(*pair)]
            return statement if len(kept) == len(pairs) else _with_pairs(statement, assign, kept)
        case _:
            return statement


def is_sum(node: cst.CSTNode) -> bool:
    """``a + b``, ``a - b``."""
    return isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, cst.Add | cst.Subtract
    )


def is_product(node: cst.CSTNode) -> bool:
    """``a * b``, ``a / b``, ``a @ b``."""
    return isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, cst.Multiply | cst.Divide | cst.MatrixMultiply
    )


def _is_dead(site: Site, binding: Binding, gone: Sequence[cst.CSTNode]) -> bool:
    return all(any(site.source.inside(use, each) for each in gone) for use in site.uses(binding))


def _without(statement: cst.BaseStatement, dead: Sequence[Binding]) -> Change | None:
    """An assignment without some of its parts; None where it is to stay."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    (assign, *others) = statement.body
    if others or not isinstance(assign, cst.Assign) or len(assign.targets) > 1:
        return None
    if not isinstance(assign.targets[0].target, cst.Tuple) or not isinstance(
        assign.value, cst.Tuple
    ):
        return cst.RemoveFromParent()
    names = {each.name for each in dead}
    kept = [
        (one, other)
        for one, other in _pairs(assign)
        if not (isinstance(one, cst.Name) and one.value in names)
    ]
    return _with_pairs(statement, assign, kept) or cst.RemoveFromParent()


def _pairs(assign: cst.Assign) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Targets of an assignment, each with its value."""
    target, value = assign.targets[0].target, assign.value
    match target, value:
        case cst.Tuple(elements=names), cst.Tuple(elements=values) if len(names) == len(values):
            return [(one.value, other.value) for one, other in zip(names, values, strict=True)]
        case _:
            return [(target, value)]


def _with_pairs(
    statement: cst.SimpleStatementLine,
    assign: cst.Assign,
    pairs: Sequence[tuple[cst.BaseExpression, cst.BaseExpression]],
) -> cst.SimpleStatementLine | None:
    """A statement that assigns these alone; None where there are none."""
    if not pairs:
        return None
    names, values = (_tuple([pair[side] for pair in pairs]) for side in (0, 1))
    to = assign.targets[0].with_changes(target=names)
    return statement.with_changes(body=[assign.with_changes(targets=[to], value=values)])


def _tuple(parts: Sequence[cst.BaseExpression]) -> cst.BaseExpression:
    return parts[0] if len(parts) == 1 else cst.Tuple([cst.Element(e) for e in parts], [], [])


def leaves(site: Site, changes: Mapping[cst.CSTNode, Change], node: cst.CSTNode) -> bool:
    """Whether an expression is still there after some changes."""
    return not any(site.source.inside(node, each) for each in changes)


def comments(node: cst.CSTNode) -> int:
    """How many comments stand in an expression."""
    return sum(1 for _ in walk(node, cst.Comment))


def raised(names: Sequence[str], lists: Container[str] = ()) -> cst.BaseStatement:
    """``a, b = a.float(), b.float()``; of `lists` all that is in them."""
    values = ", ".join(
        f"[each.float() for each in {each}]" if each in lists else f"{each}.float()"
        for each in names
    )
    made = cst.parse_statement(f"{', '.join(names)} = {values}\n")
    assert isinstance(made, cst.SimpleStatementLine)
    return made


def raised_before(
    line: cst.SimpleStatementLine, names: Sequence[str], what: str, why: str
) -> Edit:  # fmt: skip
    """Names in float32 from a statement on; `what` has a place for them."""

    def made(some: Sequence[str]) -> Edit | None:
        if not some:
            return None
        cast = raised(some).with_changes(leading_lines=line.leading_lines)
        below = line.with_changes(leading_lines=())
        named = what.replace("{}", joined(some))
        return Edit(named, why, {line: cst.FlattenSentinel([cast, below])})

    return of_parts(names, made)
