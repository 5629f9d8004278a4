"""The place of a fault in a file: its statement, and what the names there stand for.

A name stands for the expression that was last assigned to it, where that is certain: the assignment
is on the way to the use, in the same function, and no loop leads past another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.source import SourceFile, dotted, walk
from ampwise.numerics.remedy.patches.terms import Term, read

OTHER = "other"
"""What a name holds that is no tensor."""
LIST_OF = "list of "
"""What comes before the format of tensors that are held in a list."""


def is_other(kind: str) -> bool:
    """Whether what a name holds is no tensor by itself."""
    return kind == OTHER or kind.startswith(LIST_OF)


def writes(method: str) -> bool:
    """Whether a method writes into its tensor."""
    return method.endswith("_") and not method.endswith("__")


@dataclass(frozen=True, eq=False)
class Binding:
    """A place where a name gets a value, or where its tensor is written to.

    Attributes
    ----------
    value
        What is assigned; None where that is not an expression of its own.
    statement
        The assignment; of one in a tuple, all of it.
    parts
        Of what the value is a part.
    """

    name: str
    at: tuple[int, int]
    value: cst.BaseExpression | None = None
    statement: cst.BaseStatement | None = None
    parts: Parts | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """Names that the parts of one expression are assigned to: ``a, b = x.chunk(2)``."""

    names: tuple[str, ...]
    of: cst.BaseExpression


@dataclass(eq=False)
class Site:
    """Where a fault is.

    Attributes
    ----------
    dtypes
        By line: what dotted names held just before it ran, such as ``{"x": {"float16"}}``.
    casts_of_float32
        Lines where a model that is built was seen to be cast from float32.
    op, cause, dtype
        The operation that broke, why, and the format of its result, as the diagnosis says.
    compute_dtype
        The precision's 16-bit format.
    """

    source: SourceFile
    line: int
    op: str = ""
    cause: str = ""
    dtype: str = ""
    compute_dtype: str = "float16"
    dtypes: Mapping[int, Mapping[str, set[str]]] = field(
        default_factory=dict[int, Mapping[str, set[str]]]
    )
    casts_of_float32: Sequence[int] = ()

    def of(self, data: bytes) -> Site | None:
        """The same line in a text that is changed below it; None where lines above have moved."""
        source = SourceFile.of(self.source.path, data, self.line)
        return replace(self, source=source) if source.imports == self.source.imports else None

    # -- where -------------------------------------------------------------------------------------

    @cached_property
    def function(self) -> cst.FunctionDef | None:
        """The function around the line."""
        return self.source.function_at(self.line)

    @cached_property
    def scope(self) -> cst.CSTNode:
        """The function, or the file outside of any."""
        return self.source.module if self.function is None else self.function

    @cached_property
    def statement(self) -> cst.BaseStatement | None:
        """The statement of the line."""
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        found = [
            each
            for kind in kinds
            for each in walk(self.scope, kind)
            if self.source.covers(each, self.line) and each is not self.scope
        ]
        return max(found, key=self.source.start, default=None)

    @cached_property
    def roots(self) -> list[cst.BaseExpression]:
        """Expressions of the function; outside of any, those of the statement."""
        where = self.statement if self.function is None else self.function
        return [] if where is None else list(walk(where, cst.BaseExpression))

    @cached_property
    def expressions(self) -> list[cst.BaseExpression]:
        """Expressions with a part on the line, the innermost last."""
        if self.statement is None:
            return []
        return [
            each
            for each in walk(self.statement, cst.BaseExpression)
            if self.source.covers(each, self.line)
        ]

    def term(self, node: cst.BaseExpression) -> Term:
        """The term of an expression of this file."""
        return read(self.source, node)

    def is_half(self, node: cst.BaseExpression) -> bool:
        """Whether a name was seen to hold a 16-bit tensor at the line of its use."""
        return bool(self.kinds(node) & set(HALF))

    def kinds(self, node: cst.BaseExpression) -> set[str]:
        """Formats that a dotted name was seen to hold; empty for anything else."""
        name = dotted(node)
        if not name or node not in self.source.positions:
            return set()
        statement = self.source.statement(node)
        line = self.source.start(statement or node)[0]
        here = self.dtypes.get(line) or self.dtypes.get(self.source.start(node)[0]) or {}
        return {OTHER if is_other(each) else each for each in here.get(name, ())}

    # -- what names stand for ----------------------------------------------------------------------

    @cached_property
    def _bindings(self) -> Mapping[str, list[Binding]]:
        found: dict[str, list[Binding]] = {}
        for each in sorted(self._all_bindings(), key=lambda binding: binding.at):
            found.setdefault(each.name, []).append(each)
        return found

    def _all_bindings(self) -> Iterator[Binding]:
        for node in walk(self.scope, cst.CSTNode):
            match node:
                case cst.Assign(targets=targets, value=value):
                    for each in targets:
                        yield from self._assigned(each.target, value, node)
                case cst.AnnAssign(target=target, value=value) if value is not None:
                    yield from self._assigned(target, value, node)
                case cst.Param(name=cst.Name(value=name)):
                    yield Binding(name, self.source.start(node))
                case _:
                    if (target := _written(node)) is not None:
                        yield from self._opaque(target)

    def _assigned(
        self, target: cst.BaseExpression, value: cst.BaseExpression, node: cst.CSTNode
    ) -> Iterator[Binding]:
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            for one, other in zip(target.elements, value.elements, strict=False):
                yield from self._assigned(one.value, other.value, node)
        elif isinstance(target, cst.Name):
            statement = self.source.statement(target)
            yield Binding(target.value, self.source.end(node), value, statement)
        elif isinstance(target, cst.Tuple) and all(
            isinstance(each.value, cst.Name) for each in target.elements
        ):
            names = [each.value for each in target.elements if isinstance(each.value, cst.Name)]
            parts = Parts(tuple(each.value for each in names), value)
            for each in names:
                statement = self.source.statement(each)
                yield Binding(each.value, self.source.end(node), None, statement, parts)
        else:
            yield from self._opaque(target)

    def _opaque(self, target: cst.CSTNode) -> Iterator[Binding]:
        """Names that a target binds or writes to."""
        if isinstance(target, cst.Tuple | cst.List):
            for each in target.elements:
                yield from self._opaque(each.value)
            return
        while isinstance(target, cst.Attribute | cst.Subscript):
            target = target.value
        if isinstance(target, cst.Name):
            yield Binding(target.value, self.source.start(target))

    def definition(self, name: cst.BaseExpression) -> Binding | None:
        """What a name stands for where it is used; None where that is not certain."""
        last = self._certain(name)
        return None if last is None or last.value is None else last

    def values_of(self, name: str) -> list[cst.BaseExpression]:
        """All that is assigned to a name."""
        return [each.value for each in self._bindings.get(name, ()) if each.value is not None]

    def parts_with(self, name: cst.Name) -> Parts | None:
        """What a name is a part of where it is used; None where that is not certain."""
        last = self._certain(name)
        return None if last is None else last.parts

    def _certain(self, name: cst.BaseExpression) -> Binding | None:
        """The assignment that a name has its value from; None where that is not certain."""
        if not isinstance(name, cst.Name) or name not in self.source.positions:
            return None
        last = self._reaching(name.value, self.source.start(name))
        if last is None or last.statement is None:
            return None
        if not self.has_run(last, name):
            return None
        return None if self._in_loop(name) and len(self._bindings[name.value]) > 1 else last

    def has_run(self, binding: Binding, at: cst.CSTNode) -> bool:
        """Whether the assignment of a binding is on every way to a place below it."""
        if binding.statement is None:
            return False
        block = self.source.parents[binding.statement]
        return any(each is block for each in self.source.up(at))

    def carried(self, name: cst.CSTNode) -> tuple[cst.For | cst.While, Binding] | None:
        """The loop that goes on with what a name holds, and what it begins with; None where none.

        Of loops in each other the outermost.
        """
        if not isinstance(name, cst.Name) or name not in self.source.positions:
            return None
        every = self._bindings.get(name.value, ())
        begin = self._reaching(name.value, self.source.start(name))
        loops = [each for each in self.source.up(name) if isinstance(each, cst.For | cst.While)]
        for loop in reversed(loops):
            first, last = self.source.start(loop), self.source.end(loop)
            if begin is not None and begin.at < first and any(first < e.at <= last for e in every):
                return loop, begin
        return None

    def _in_loop(self, node: cst.CSTNode) -> bool:
        return any(isinstance(each, cst.For | cst.While) for each in self.source.up(node))

    def _reaching(self, name: str, at: tuple[int, int]) -> Binding | None:
        """The last binding of a name before a place."""
        before = [each for each in self._bindings.get(name, []) if each.at < at]
        return before[-1] if before else None

    def unchanged(self, node: cst.CSTNode, at: tuple[int, int]) -> bool:
        """Whether an expression means the same at a later place: no name of it is bound anew."""
        names = {each.value for each in walk(node, cst.Name)}
        begin = self.source.start(node)
        return all(self._reaching(each, begin) is self._reaching(each, at) for each in names)

    def uses(self, binding: Binding) -> list[cst.Name]:
        """Where the value of a binding is read."""
        return [
            each
            for each in walk(self.scope, cst.Name)
            if each.value == binding.name
            and each in self.source.positions
            and not self.is_label(each)
            and self._reaching(each.value, self.source.start(each)) is binding
        ]

    def holder(self, name: cst.Name) -> cst.CSTNode:
        """What a name stands in, tuples left out: ``a, b = ...``."""
        above = self.source.parents[name]
        while isinstance(above, cst.Element | cst.Tuple):
            above = self.source.parents[above]
        return above

    def is_label(self, name: cst.Name) -> bool:
        """Whether a name is an attribute's, a keyword's, or one that is assigned to.

        Or one that only a lambda or a comprehension knows.
        """
        if any(name.value in _known_in(each) for each in self.source.up(name)):
            return True
        match self.holder(name):
            case cst.AssignTarget() | cst.Param():
                return True
            case cst.Attribute(attr=label) | cst.Arg(keyword=label):
                return label is name
            case _:
                return False


def _known_in(node: cst.CSTNode) -> set[str]:
    """Names that only the inside of an expression knows."""
    match node:
        case cst.Lambda(params=params):
            return {each.name.value for each in walk(params, cst.Param)}
        case cst.GeneratorExp() | cst.ListComp() | cst.SetComp() | cst.DictComp():
            targets = [each.target for each in walk(node, cst.CompFor)]
            return {each.value for target in targets for each in walk(target, cst.Name)}
        case _:
            return set()


def _written(node: cst.CSTNode) -> cst.CSTNode | None:
    """What a node binds or writes to but by assignment: in ``for``, ``x += 1``, ``x.add_(1)``."""
    match node:
        case (
            cst.AugAssign(target=target)
            | cst.For(target=target)
            | cst.CompFor(target=target)
            | cst.NamedExpr(target=target)
            | cst.AsName(name=target)
        ):
            return target
        case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=method))):
            return base if writes(method) else None
        case _:
            return None
