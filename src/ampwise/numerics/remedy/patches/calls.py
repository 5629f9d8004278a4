"""Float32 for what comes into helpers, where a line calls them: the user's own functions.

A value that was rounded in one of them, and shows in another, is mended in neither. Where they are
called, all of the chain is in float32 once what it begins with is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from ampwise.numerics.remedy.patches.constants import assigned
from ampwise.numerics.remedy.patches.dtypes import casts, may_be_half
from ampwise.numerics.remedy.patches.edit import Edit, of_parts, separable, widened
from ampwise.numerics.remedy.patches.island import bare, outside_autocast
from ampwise.numerics.remedy.patches.site import OTHER, Site
from ampwise.numerics.remedy.patches.source import Change, changed, dotted, walk
from ampwise.numerics.remedy.patches.terms import ELEMENTWISE, TENSORS
from ampwise.numerics.remedy.patches.views import raised_as_one, viewed
from ampwise_lint.base.words import joined

_WHY = "The values between these functions are in float32, then, too."
_TENSOR_LIKE = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BinaryOperation)


@dataclass(frozen=True, eq=False)
class CallSite:
    """A call that led to the function of a fault.

    Attributes
    ----------
    site
        The line of the call.
    end
        Where the call ends; of the line of the fault, which is no call, the start of the file.
    among_layers
        Whether the function that it is in runs layers.
    helpers
        Where calls end, in the same file, of functions of the user's own that run no layer.
    """

    site: Site
    end: tuple[int, int]
    among_layers: bool = True
    helpers: frozenset[tuple[int, int]] = field(default_factory=frozenset[tuple[int, int]])

    @property
    def call(self) -> cst.Call | None:
        """The call; None where it runs layers, or is not found."""
        if self.end not in self.helpers:
            return None
        found = [each for each in self.site.roots if self._ends_at(each, {self.end})]
        return found[0] if found and isinstance(found[0], cst.Call) else None

    def is_helper(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is such a call."""
        return self._ends_at(node, self.helpers)

    def _ends_at(
        self, node: cst.BaseExpression, ends: set[tuple[int, int]] | frozenset[tuple[int, int]]
    ) -> bool:
        source = self.site.source
        return isinstance(node, cst.Call) and node in source.positions and source.end(node) in ends


def edits(at: CallSite) -> Iterator[Edit]:
    """What the chain of helpers at a call begins with, in float32; then outside of autocast."""
    call, site = at.call, at.site
    if call is None:
        return
    helpers: list[cst.Call] = []
    changes: dict[cst.CSTNode, Change] = {
        each: widened(at.site, each) for each in _begins_with(at, call, helpers)
    }
    if not changes:
        return
    changes = raised_as_one(site, changes)
    what = _what_is_given(reversed(helpers))
    yield separable(what, _WHY, changes)
    line = site.statement
    runs_layers = any(isinstance(each, cst.Call) for each in changes)
    if isinstance(line, cst.SimpleStatementLine) and not runs_layers:

        def made(some: Sequence[tuple[cst.CSTNode, Change]]) -> Edit:
            within = {each: new for each, new in some if site.source.inside(each, line)}
            rest = {each: new for each, new in some if each not in within}
            block = outside_autocast(site, [bare(changed(line, within))], [line])
            return Edit(f"{what}, outside of autocast", _WHY, {**rest, line: block})

        yield of_parts(list(changes.items()), made)


def given_here(at: CallSite) -> Iterator[Edit]:
    """What helpers are given that make what the line itself computes with, in float32."""
    site = at.site
    made = [*site.expressions, *(value for _, value in assigned(site))]
    helpers: list[cst.Call] = []
    changes: dict[cst.CSTNode, Change] = {
        node: widened(site, node)
        for call in dict.fromkeys(call for each in made for call in walk(each, cst.Call))
        if at.is_helper(call)
        for node in _begins_with(at, call, helpers)
    }
    if changes:
        cast = raised_as_one(site, changes)
        yield casts(site, _what_is_given(helpers), _WHY, cast, alone=False)


def _what_is_given(helpers: Iterable[cst.Call]) -> str:
    names = dict.fromkeys(dotted(each.func).rpartition(".")[2] for each in helpers)
    given = "is given" if len(names) == 1 else "are given"
    return f"what {joined(names)} {given}, in float32"


def _begins_with(
    at: CallSite, call: cst.Call, helpers: list[cst.Call]
) -> Iterator[cst.BaseExpression]:
    """What comes into a call from elsewhere than helpers and formulas; notes the helpers."""
    if call in helpers:
        return
    helpers.append(call)
    for each in call.args:
        if not each.star:
            yield from _sources(at, each.value, helpers)


def _sources(
    at: CallSite, node: cst.BaseExpression, helpers: list[cst.Call]
) -> Iterator[cst.BaseExpression]:
    site = at.site
    kinds = site.kinds(node)
    if kinds and kinds <= {OTHER}:
        return
    if at.is_helper(node):
        assert isinstance(node, cst.Call)
        yield from _begins_with(at, node, helpers)
        return
    term = site.term(node)
    if term.op in ELEMENTWISE:
        for each in map(term.get, TENSORS):
            if each is not None and not each.is_constant:
                yield from _sources(at, each.node, helpers)
        return
    if (base := _reshaped(node)) is not None and (
        _holds_helper(at, base) or (viewed(site, node) is base and _defined(at, base) is not None)
    ):
        yield from _sources(at, base, helpers)
        return
    inner = _defined(at, node)
    if inner is not None:
        yield from _sources(at, inner, helpers)
    elif isinstance(node, _TENSOR_LIKE) and may_be_half(site, term):
        yield node


def _defined(at: CallSite, node: cst.BaseExpression) -> cst.BaseExpression | None:
    """What a name stands for, where that is a helper's or a formula."""
    binding = at.site.definition(node)
    inner = None if binding is None else binding.value
    if inner is not None and (_holds_helper(at, inner) or at.site.term(inner).op in ELEMENTWISE):
        return inner
    return None


def _reshaped(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """What a method is called of, or a part is taken of."""
    match node:
        case cst.Call(func=cst.Attribute(value=base)) | cst.Subscript(value=base):
            return base
        case _:
            return None


def _holds_helper(at: CallSite, node: cst.BaseExpression) -> bool:
    return any(at.is_helper(each) for each in walk(node, cst.Call))
