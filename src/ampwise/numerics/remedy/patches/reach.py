"""Float32 from further back: where what a line computes with was made, up to helpers before.

Casting at the line keeps nothing of what was rounded before it. So the operand is followed back,
beyond views and parts of it, to what it is computed from; then the statements from there on are in
float32, then the function; and the formats that helpers write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import libcst as cst

from ampwise.numerics.remedy.patches.constants import assigned, terms
from ampwise.numerics.remedy.patches.dtypes import (
    FLOAT32,
    half_operands,
    in_place_of,
    may_be_half,
)
from ampwise.numerics.remedy.patches.edit import (
    Edit,
    method,
    of_parts,
    raised,
    separable,
    widened,
)
from ampwise.numerics.remedy.patches.island import (
    WHY,
    arguments_of,
    bare,
    calls_a_module,
    calls_an_argument,
    can_be_moved,
    is_computed_with,
    is_docstring,
    is_half_at,
    names_read,
    outside_autocast,
    span,
)
from ampwise.numerics.remedy.patches.products import multiplies
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import Change, changed, walk
from ampwise.numerics.remedy.patches.terms import ELEMENTWISE, TENSORS, Term
from ampwise.numerics.remedy.patches.views import outermost, viewed
from ampwise.numerics.remedy.patches.written import (
    formats_asked,
    of_half,
    only_asked,
    taken_over,
    wide,
)
from ampwise_lint.base.words import joined


def operands(site: Site) -> Iterator[Edit]:
    """What the line computes with in float32 from where it is made, beyond views of it."""
    changes: dict[cst.CSTNode, Change] = {}
    for term in (each for each in map(site.term, site.expressions) if each.op in ELEMENTWISE):
        changes |= {node: widened(site, node) for node in _sources(site, term.node)}
    if changes := outermost(site, changes):
        what = "what the formula starts from in float32, a few lines above"
        yield separable(what, FLOAT32, changes)


def _sources(site: Site, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    term = site.term(node)
    if term.op in ELEMENTWISE:
        for each in map(term.get, TENSORS):
            if each is not None:
                yield from _sources(site, each.node)
        return
    if (base := viewed(site, node)) is not None:
        inner = list(_sources(site, base))
        # A part is cast, not all that it is a part of.
        yield from [node] if inner == [base] and isinstance(node, cst.Subscript) else inner
        return
    binding = site.definition(node)
    value = None if binding is None else binding.value
    if value is not None and (
        site.term(value).op in ELEMENTWISE or viewed(site, value) is not None
    ):
        yield from _sources(site, value)
    elif not term.is_constant and may_be_half(site, term):
        yield node


def formats(site: Site) -> Iterator[Edit]:
    """Formats that are written in the function, or taken over from a 16-bit tensor, as float32."""
    changes = {} if site.function is None else wide(site, site.function)
    changes |= of_half(site, taken_over(site, site.roots))
    if changes:
        yield from in_place_of("a cast to float32", "16 bits", site, changes)


def softmaxes(site: Site) -> Iterator[Edit]:
    """Float32 for softmaxes that make what the line computes with, as autocast has them on a GPU.

    On a CPU it leaves them in 16 bits.
    """
    at_line = set(site.expressions)
    yield from _in_float32(site, (each for each in terms(site) if each.node not in at_line))


def all_softmaxes(site: Site) -> Iterator[Edit]:
    """The same for all of a helper that ran before the function of the fault."""
    yield from _in_float32(site, map(site.term, site.roots))


def _in_float32(site: Site, found: Iterable[Term]) -> Iterator[Edit]:
    several = [each for each in found if each.op in _SOFTMAXES]
    changes: dict[cst.CSTNode, Change] = {
        node: widened(site, node) for each in several for node in half_operands(site, each)
    }
    if changes:
        what = f"{joined(dict.fromkeys(each.op for each in several))} in float32"
        yield separable(what, FLOAT32, changes)


_SOFTMAXES = ("log_softmax", "softmax", "logsumexp", "logsigmoid", "cross_entropy", "nll_loss")
"""Of the functions that autocast computes in float32 on a GPU, those of a loss."""


def statements(site: Site) -> Iterator[Edit]:
    """The statement at the line in float32, with all from one on that makes what it computes with.

    The nearest first; of a whole function, that is `function`.
    """
    above = None if site.statement is None else site.source.parents[site.statement]
    if not isinstance(above, cst.IndentedBlock):
        return
    body = list(above.body)
    at = next(number for number, each in enumerate(body) if each is site.statement)
    makers = [site.source.statement(value) for _, value in assigned(site)]
    places = {number for number, each in enumerate(body[:at]) if each in makers}
    for begin in sorted(places, reverse=True):
        part = body[begin : at + 1]
        if begin and all(can_be_moved(site, each) for each in part):
            yield span(site, part, body[at + 1 :])


def function(site: Site) -> Iterator[Edit]:
    """The arguments of the function in float32, and its products of matrices outside of autocast.

    All that it computes is then in float32, and most of it stays as it is.
    """
    if site.function is None or not isinstance(site.function.body, cst.IndentedBlock):
        return
    body = site.function.body.body
    rest = body[1:] if is_docstring(body[0]) else body
    if not rest or calls_an_argument(site.function, site) or any(map(calls_a_module, rest)):
        return
    lines = list(walk(site.function.body, cst.SimpleStatementLine))
    products = [each for each in lines if multiplies(site, each)]
    if not products and any(multiplies(site, each) for each in rest):
        return  # at the head of a compound statement
    half = [each for each in arguments_of(site.function) if is_half_at(site, each, rest[0])]
    asked = [each for each in half if only_asked(site, each)]
    plain = {name for each in lines if each not in products for name in names_read(site, each)}
    used = [name.value for each in products for name in walk(each, cst.Name)]

    def made(names: Sequence[str]) -> Edit | None:
        first = [e for e in names if e in plain or used.count(e) > 1]
        within = {each for each in names if each not in first}
        changes: dict[cst.CSTNode, Change] = {**formats_asked(site, asked)}
        for each in products:
            casts = {
                node: method(node, "float")
                for node in walk(each, cst.Name)
                if node.value in within and not site.is_label(node) and is_computed_with(site, node)
            }
            casts |= {node: to for node, to in changes.items() if site.source.inside(node, each)}
            here = replace(site, line=site.source.start(each)[0])
            changes[each] = outside_autocast(here, [bare(changed(each, casts))], [each])
        if first:
            leading = getattr(rest[0], "leading_lines", ())
            now = changes[rest[0]] if rest[0] in changes else changed(rest[0], changes)
            assert isinstance(now, cst.BaseStatement)
            cast = raised(first).with_changes(leading_lines=leading)
            changes[rest[0]] = cst.FlattenSentinel([cast, bare(now)])
        return Edit("the function in float32", WHY, changes) if changes else None

    names = [each for each in half if each not in asked]
    if made(names) is not None:
        yield of_parts(names, made)
