"""Rewrites as pairs of templates: ``log(softmax(X, dim=D))`` becomes ``F.log_softmax(X, dim=D)``.

A word in capitals is a hole: it takes any expression, the same one everywhere. One that ends in
``_`` may be missing. Sums and products match in either order. A name in the code is followed to
what it stands for (`Site.definition`), so that a formula is found over several lines; assignments
that nothing needs any more are dropped.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import libcst as cst

from ampwise.numerics.remedy.patches.edit import (
    Edit,
    comments,
    enclosed,
    is_product,
    is_sum,
    leaves,
    merged,
    replaced,
)
from ampwise.numerics.remedy.patches.site import Binding, Site
from ampwise.numerics.remedy.patches.source import Change, dotted, same, walk
from ampwise.numerics.remedy.patches.terms import PARAMETERS, Term

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul",
}  # fmt: skip
_COMMUTES = ("add", "mul")
_HOMES = {"torch": "torch", "F": "torch.nn.functional"}


@dataclass(frozen=True, eq=False)
class Match:
    """What a template matched.

    Attributes
    ----------
    holes
        What each hole took.
    nodes
        Expressions that the operations of the template stand in.
    followed
        Assignments that were followed.
    """

    holes: Mapping[str, Term] = field(default_factory=dict[str, Term])
    nodes: tuple[cst.BaseExpression, ...] = ()
    followed: tuple[Binding, ...] = ()


Guard = Callable[[Mapping[str, Term]], bool]


@dataclass(frozen=True)
class Rewrite:
    """A formula, and what to write instead.

    Attributes
    ----------
    pattern
        Spellings of the formula.
    instead
        The replacement; ``torch.`` and ``F.`` are written as the file writes them.
    guard
        What else must hold of the holes.
    """

    what: str
    why: str
    pattern: tuple[str, ...]
    instead: str
    guard: Guard | None = None

    @cached_property
    def _patterns(self) -> list[ast.expr]:
        return [ast.parse(each, mode="eval").body for each in self.pattern]

    def edits(self, site: Site) -> Iterator[Edit]:
        """The changes to a function's formulas that the line of the fault has a part in.

        Of several, all together come first.
        """
        found = list(self._edits(site))
        together = merged(site, found)
        return iter(found if together is None else [together, *found])

    def _edits(self, site: Site) -> Iterator[Edit]:
        for root in site.roots:
            if (found := self._match(site, root)) is not None:
                holes = {name: each.node for name, each in found.holes.items()}
                made = built(site, self.instead, holes)
                changes = replaced(site, root, made, found.followed)
                if comments(made) == comments(root) and _is_sound(site, found, changes):
                    yield Edit(self.what, self.why, changes)

    def _match(self, site: Site, root: cst.BaseExpression) -> Match | None:
        """The first way in which an expression is one of the spellings, and may be replaced."""
        term = site.term(root)
        for pattern in self._patterns if term.op else ():
            for each in _matches(site, pattern, term, Match()):
                found = _brought(site, root, each)
                if found is not None and self._fits(site, found):
                    return found
        return None

    def _fits(self, site: Site, found: Match) -> bool:
        if not any(site.source.covers(each, site.line) for each in found.nodes):
            return False
        twice = (name for name in found.holes if self._times(name) > 1)
        if not all(is_cheap(found.holes[name].node) for name in twice):
            return False
        return self.guard is None or self.guard(found.holes)

    def _times(self, hole: str) -> int:
        """How often the replacement has a hole."""
        return len(re.findall(rf"\b{hole}\b", self.instead))


def _brought(site: Site, root: cst.BaseExpression, found: Match) -> Match | None:
    """A match whose holes mean at the root what they meant where they stood.

    A name that is bound anew on the way (``s = s.masked_fill(...)``) is replaced by what it stood
    for, if nothing else uses that.
    """
    at = site.source.start(root)
    holes, followed = dict(found.holes), list(found.followed)
    for name, term in found.holes.items():
        node = term.node
        while not site.unchanged(node, at):
            binding = site.definition(node)
            if binding is None or binding.value is None or len(site.uses(binding)) > 1:
                return None
            node = binding.value
            followed.append(binding)
        holes[name] = site.term(node)
    return Match(holes, found.nodes, tuple(followed))


def _is_sound(site: Site, found: Match, changes: Mapping[cst.CSTNode, Change]) -> bool:
    """Whether the faulty line is gone with the changes, and nothing is called twice after them."""
    at_fault = [each for each in found.nodes if site.source.covers(each, site.line)]
    if any(leaves(site, changes, each) for each in at_fault):
        return False
    kept = [each.value for each in found.followed if each.value and each.statement not in changes]
    return not any(
        site.source.inside(hole.node, value) and any(True for _ in walk(hole.node, cst.Call))
        for hole in found.holes.values()
        for value in kept
    )


def is_cheap(node: cst.BaseExpression) -> bool:
    """Whether an expression may be written twice: names, numbers, and comparisons of them."""
    if isinstance(node, cst.Comparison):
        parts = [node.left, *(each.comparator for each in node.comparisons)]
        return all(map(is_cheap, parts))
    if isinstance(node, cst.UnaryOperation):
        return is_cheap(node.expression)
    return bool(dotted(node)) or isinstance(node, cst.Integer | cst.Float)


def _matches(site: Site, pattern: ast.expr, term: Term, so_far: Match) -> Iterator[Match]:
    """Every way in which a term fits a template."""
    if isinstance(pattern, ast.Name):
        yield from _filled(pattern.id, term, so_far)
        return
    if (number := _number(pattern)) is not None:
        if term.is_constant and term.value == number:
            yield so_far
        return
    op, wanted = _operation(pattern)
    if not term.op:
        binding = site.definition(term.node)
        if binding is not None and binding.value is not None:
            more = Match(so_far.holes, so_far.nodes, (*so_far.followed, binding))
            yield from _matches(site, pattern, site.term(binding.value), more)
        return
    if term.op == op:
        here = Match(so_far.holes, (*so_far.nodes, term.node), so_far.followed)
        for order in _orders(op, wanted):
            yield from _all_match(site, order, term, here)


def _orders(op: str, wanted: dict[str, ast.expr]) -> Iterator[dict[str, ast.expr]]:
    yield wanted
    if op in _COMMUTES:
        yield {"input": wanted["other"], "other": wanted["input"]}


def _all_match(
    site: Site, wanted: dict[str, ast.expr], term: Term, so_far: Match
) -> Iterator[Match]:
    """Ways in which the parameters of an operation fit; more than the template has never do."""
    if set(term.parameters) - set(wanted):
        return
    if not wanted:
        yield so_far
        return
    (name, pattern), *rest = wanted.items()
    given = term.get(name)
    if given is None:
        if isinstance(pattern, ast.Name) and pattern.id.endswith("_"):
            yield from _all_match(site, dict(rest), term, so_far)
        return
    left = Term(term.node, term.op, {k: v for k, v in term.parameters.items() if k != name})
    for each in _matches(site, pattern, given, so_far):
        yield from _all_match(site, dict(rest), left, each)


def _filled(hole: str, term: Term, so_far: Match) -> Iterator[Match]:
    taken = so_far.holes.get(hole)
    if taken is None:
        yield Match({**so_far.holes, hole: term}, so_far.nodes, so_far.followed)
    elif same(taken.node, term.node):
        yield so_far


def _number(pattern: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(pattern)
    except ValueError:
        return None
    return value if isinstance(value, int | float) else None


def _operation(pattern: ast.expr) -> tuple[str, dict[str, ast.expr]]:
    """The operation that a template asks for, and its parameters."""
    if isinstance(pattern, ast.BinOp):
        return _OPERATORS[type(pattern.op)], {"input": pattern.left, "other": pattern.right}
    if isinstance(pattern, ast.UnaryOp):
        return "neg", {"input": pattern.operand}
    assert isinstance(pattern, ast.Call)
    assert isinstance(pattern.func, ast.Name)
    op = pattern.func.id
    given = dict(zip(PARAMETERS[op], pattern.args, strict=False))
    return op, given | {each.arg: each.value for each in pattern.keywords if each.arg}


# -- what is written instead ----------------------------------------------------------------------


def built(site: Site, template: str, holes: Mapping[str, cst.BaseExpression]) -> cst.BaseExpression:
    """An expression from a template, its holes filled."""
    made = cst.parse_expression(template).visit(_Builder(site, holes))
    assert isinstance(made, cst.BaseExpression)
    return made


class _Builder(cst.CSTTransformer):
    """Fills holes, drops arguments without a value, and spells torch's names."""

    def __init__(self, site: Site, holes: Mapping[str, cst.BaseExpression]) -> None:
        super().__init__()
        self._site, self._holes = site, holes

    def leave_Arg(  # noqa: N802 - libcst's name
        self, original_node: cst.Arg, updated_node: cst.Arg
    ) -> cst.Arg | cst.RemovalSentinel:
        """Fill an argument; drop one that was not given."""
        hole = original_node.value
        if isinstance(hole, cst.Name) and _is_hole(hole.value):
            if hole.value not in self._holes:
                return cst.RemoveFromParent()
            return updated_node.with_changes(value=_bare(self._holes[hole.value]))
        return updated_node

    def leave_Element(  # noqa: N802 - libcst's name
        self, original_node: cst.Element, updated_node: cst.Element
    ) -> cst.Element:
        """Fill an entry of a list: it needs no parentheses."""
        hole = original_node.value
        if isinstance(hole, cst.Name) and hole.value in self._holes:
            return updated_node.with_changes(value=_bare(self._holes[hole.value]))
        return updated_node

    def leave_Call(  # noqa: N802 - libcst's name
        self,
        original_node: cst.Call,  # noqa: ARG002
        updated_node: cst.Call,
    ) -> cst.Call:
        """No comma behind the last argument, which another may have followed."""
        if not updated_node.args:
            return updated_node
        *first, last = updated_node.args
        return updated_node.with_changes(
            args=[*first, last.with_changes(comma=cst.MaybeSentinel.DEFAULT)]
        )

    def leave_Name(  # noqa: N802 - libcst's name
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        """Fill a hole that is a part of an expression."""
        if _is_hole(original_node.value) and original_node.value in self._holes:
            return enclosed(self._holes[original_node.value])
        return updated_node

    def leave_BinaryOperation(  # noqa: N802 - libcst's name
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        """No parentheses around what a sum, or product, begins with: a minus, a product."""
        hole = original_node.left
        first = self._holes.get(hole.value) if isinstance(hole, cst.Name) else None
        if first is not None and not first.lpar and is_product(first) and is_product(original_node):
            return updated_node.with_changes(left=first)
        left = updated_node.left
        if is_sum(original_node) and isinstance(left, cst.UnaryOperation) and len(left.lpar) == 1:
            return updated_node.with_changes(left=left.with_changes(lpar=(), rpar=()))
        return updated_node

    def leave_Attribute(  # noqa: N802 - libcst's name
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Spell ``torch.name`` and ``F.name``."""
        home = original_node.value
        if isinstance(home, cst.Name) and home.value in _HOMES:
            full = f"{_HOMES[home.value]}.{original_node.attr.value}"
            return cst.parse_expression(self._site.source.spelled(full))
        return updated_node

    def leave_Float(  # noqa: N802 - libcst's name
        self, original_node: cst.Float, updated_node: cst.Float
    ) -> cst.BaseExpression:
        """Write ``math.log(2)`` where the file has `math`."""
        source = self._site.source
        if original_node.value == str(math.log(2)) and "math" in source.imports.values():
            return cst.parse_expression(f"{source.spelled('math.log')}(2)")
        return updated_node


def _is_hole(name: str) -> bool:
    return name.isupper() and name not in _HOMES


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression as an argument: its own parentheses, on one line, are not needed."""
    if node.lpar and not comments(node) and not isinstance(node, cst.Tuple | cst.GeneratorExp):
        return node.with_changes(lpar=node.lpar[1:], rpar=node.rpar[:-1])
    return node
