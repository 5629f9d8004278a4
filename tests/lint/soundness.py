"""What an edit may not do to a file, whatever the rule: read off the text before and after.

Nothing here asks the linter: names are looked up in the torch that is installed, and calls are
bound against its signatures.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import symtable
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
VALUES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
BUILTINS = {*dir(builtins), "__file__", "__class__", "__path__", "__builtins__", "WindowsError"}


def spoilt(before: str, after: str) -> list[str]:
    """What is wrong with a file that was not wrong before an edit; empty if all is well."""
    try:
        compile(after, "after", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return [f"does not compile: {error}"]
    old, new = _File(before), _File(after)
    found = [f"unbound name: {each}" for each in sorted(new.unbound() - old.unbound())]
    found += [f"nowhere before: {each}" for each in sorted(new.owners() - old.paths())]
    found += [f"does not bind: {each}" for each in new.misbound() - old.misbound()]
    found += [f"handed on with another signature: {each}" for each in new.values() - old.values()]
    found += [f"a branch for other versions changed: {e}" for e in old.guarded() - new.guarded()]
    found += [f"a step lost an argument: {each}" for each in old.closures() - new.closures()]
    return found


class _File:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tree = ast.parse(text)
        self._nodes = list(ast.walk(self._tree))
        self._parents = {id(c): n for n in self._nodes for c in ast.iter_child_nodes(n)}
        self._imported: dict[str, set[str]] = {"torch": {"torch"}}  # also by a star
        for node in self._nodes:
            self._see_import(node)
        self._aliases: dict[str, list[ast.expr]] = {}
        for node in self._nodes:
            for name, value in _assignments(node):
                self._aliases.setdefault(name, []).append(value)

    def _see_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                full = each.name if each.asname else first
                self._imported.setdefault(each.asname or first, set()).add(full)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                full = f"{node.module}.{each.name}"
                self._imported.setdefault(each.asname or each.name, set()).add(full)

    # ------------------------------------------------------------------ names

    def unbound(self) -> set[str]:
        """Names that nothing in the file binds."""
        top = symtable.symtable(self._text, "file", "exec")
        bound = {e.get_name() for e in top.get_symbols() if e.is_assigned() or e.is_imported()}
        bound |= {e.get_name() for e in top.get_symbols() if e.is_namespace()}
        waiting, found = [top], set[str]()
        while waiting:
            table = waiting.pop()
            waiting += table.get_children()
            for each in table.get_symbols():
                if each.is_declared_global() and each.is_assigned():
                    bound.add(each.get_name())
                if each.is_referenced() and (each.is_global() or table is top):
                    found.add(each.get_name())
        return found - bound - BUILTINS

    def paths(self) -> set[str]:
        """Paths such as ``self.scaler``, those of torch aside."""
        found = (node for node in self._nodes if isinstance(node, ast.Attribute))
        return {_dotted(each) for each in found if self._path(each) is None} - {""}

    def owners(self) -> set[str]:
        """Of these, the ones that something is read of."""
        found = (node.value for node in self._nodes if isinstance(node, ast.Attribute))
        return {_dotted(e) for e in found if isinstance(e, ast.Attribute)} & self.paths()

    def _path(self, node: ast.AST) -> str | None:
        """The full name of something of torch."""
        text = _dotted(node)
        first, _, rest = text.partition(".")
        for home in sorted(self._imported.get(first, ())):
            full = f"{home}.{rest}" if rest else home
            if full.partition(".")[0] in ("torch", "functools"):
                return full
        return None

    # ------------------------------------------------------------------ calls

    def misbound(self) -> Counter[str]:
        """Calls of torch's functions that their signatures refuse."""
        found: Counter[str] = Counter()
        for node in self._nodes:
            if isinstance(node, ast.Call):
                for target, given in self._targets(node.func):
                    if not _binds(target, [*given, node]):
                        found[ast.unparse(node)] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for each in node.decorator_list:
                    path = self._path(each)
                    if path is not None and not _binds(path, [_ONE]):
                        found[f"@{ast.unparse(each)}"] += 1
        return found

    def _targets(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[str, list[ast.Call]]]:
        """What a called expression may be: full names, and the calls of ``partial`` on the way."""
        if isinstance(node, ast.IfExp):
            yield from self._targets(node.body, depth)
            yield from self._targets(node.orelse, depth)
        elif isinstance(node, ast.Call) and self._path(node.func) == "functools.partial":
            if node.args:
                for path, given in self._targets(node.args[0], depth):
                    rest = ast.Call(node.func, node.args[1:], node.keywords)
                    yield path, [*given, rest]
        elif (path := self._path(node)) is not None:
            yield path, []
        elif depth < 3:
            for each in self._aliases.get(_dotted(node), ()):
                yield from self._targets(each, depth + 1)

    def values(self) -> Counter[str]:
        """Functions whose old and new home take other arguments, where they are not called."""
        found: Counter[str] = Counter()
        for node in self._nodes:
            if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            path = self._path(node)
            if path is None or not path.startswith("torch.amp."):
                continue
            if path.rpartition(".")[2] in VALUES and not self._is_harmless(node):
                found[ast.unparse(self._parents[id(node)])] += 1
        return found

    def _is_harmless(self, node: ast.AST) -> bool:
        around = self._parents[id(node)]
        match around:
            case ast.Call(func=func, args=args):
                if func is node:
                    return True
                first = args[:1] == [node]
                return _dotted(func) == "isinstance" or (
                    first and self._path(func) == "functools.partial"
                )
            case ast.arg() | ast.Attribute():
                return True
            case ast.AnnAssign(annotation=annotation):
                return annotation is node
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                return returns is node or node in decorators
            case ast.BinOp() | ast.Tuple() | ast.Subscript():
                return self._is_harmless(around)
            case _:
                return False

    # ------------------------------------------------------------------ what stays

    def guarded(self) -> Counter[str]:
        """Statements that catch an import that fails."""
        return Counter(
            ast.unparse(node)
            for node in self._nodes
            if isinstance(node, ast.Try)
            and any(e.type and "ImportError" in ast.unparse(e.type) for e in node.handlers)
            and all(isinstance(e, ast.Import | ast.ImportFrom | ast.Assign) for e in node.body)
        )

    def closures(self) -> Counter[str]:
        """Whatever steps are given beside an optimizer."""
        found: Counter[str] = Counter()
        for node in self._nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="step"), args=args):
                    extra = [*args, *(each.value for each in node.keywords)]
                    if "scaler" in ast.unparse(owner).lower():
                        extra = extra[1:]
                    found.update(map(ast.unparse, extra))
                case _:
                    pass
        return found


_ONE = ast.Call(ast.Name("f"), [ast.Constant(0)], [])
"""What a decorator does with its function."""


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((_dotted(each), value) for each in targets if _dotted(each))
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield _dotted(target), value
        case ast.FunctionDef(args=args) | ast.Lambda(args=args):
            names = [*args.posonlyargs, *args.args]
            both = zip(reversed(names), reversed(args.defaults), strict=False)
            yield from ((each.arg, value) for each, value in both)
        case _:
            pass


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if base := _dotted(value):
            return f"{base}.{attr}"
        case _:
            return ""


@cache
def _found(path: str) -> Any:
    """Something of torch by its full name; None where there is no such thing."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for each in parts[count:]:
            value = getattr(value, each, None)
        return value
    return None


def _binds(path: str, calls: Sequence[ast.Call]) -> bool:
    """Whether a function takes the arguments of some calls together (``partial`` and its call)."""
    if path.partition(".")[0] != "torch":
        return True
    target = _found(path)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return target is not None or path.count(".") < 2
    positional = [each for call in calls for each in call.args]
    keywords = [each for call in calls for each in call.keywords]
    is_open = any(isinstance(e, ast.Starred) for e in positional) or any(
        each.arg is None for each in keywords
    )
    bind = signature.bind_partial if is_open else signature.bind
    names = {each.arg: 0 for each in keywords if each.arg is not None}
    if len(calls) == 1 and len(names) < sum(each.arg is not None for each in keywords):
        return False
    try:
        bind(*(0 for each in positional if not isinstance(each, ast.Starred)), **names)
    except TypeError:
        return False
    return True
