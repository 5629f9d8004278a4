"""Attention by hand: the product of queries and keys leaves the range before it is scaled."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ampwise.numerics.remedy.patches.edit import Edit, enclosed, like
from ampwise.numerics.remedy.patches.site import OTHER, Site
from ampwise.numerics.remedy.patches.source import Change, changed, same
from ampwise.numerics.remedy.patches.template import Rewrite, built, is_cheap
from ampwise.numerics.remedy.patches.terms import Term

_WHY = "The scores leave the format's range before they are scaled; the fused kernel keeps them in float32."  # noqa: E501
_SCORES = "matmul(Q, mT(K))"


def _fused(scores: str, scale: str) -> tuple[Rewrite, ...]:
    """The formula with each kind of mask; `scale` is what the kernel multiplies with."""
    what = "scaled_dot_product_attention in place of its formula"
    call = "F.scaled_dot_product_attention(Q, K, V, {mask}" + scale + ")"
    return (
        Rewrite(what, _WHY, (f"matmul(softmax({scores}, dim=-1), V)",), call.format(mask="")),
        Rewrite(
            what,
            _WHY,
            (f"matmul(softmax(masked_fill({scores}, M, C), dim=-1), V)",),
            call.format(mask="attn_mask=~M, "),
        ),
        Rewrite(
            what,
            _WHY,
            (f"matmul(softmax({scores} + M, dim=-1), V)",),
            call.format(mask="attn_mask=M, "),
        ),
    )


ROWS = (
    *_fused(f"{_SCORES} / S", "scale=1 / S"),
    *_fused(f"{_SCORES} * S", "scale=S"),
    *_fused(_SCORES, "scale=1.0"),
)

_SCALED_FIRST = {
    "matmul": ("scale before the product",
               "Each term is scaled before they are added up, and stays in range."),
    "masked_fill": ("mask after scaling",
                    "The mask's constant is the most the format has; scaled, it leaves the range."),
}  # fmt: skip


def edits(site: Site) -> Iterator[Edit]:
    """The formula of attention fused, or its order changed."""
    for row in ROWS:
        yield from row.edits(site)
    for root in site.roots:
        yield from _scaled_first(site, root)
    if site.cause == "FULLY_MASKED_ROW":
        yield from _rows_kept(site)


_IS_MASKED = ("key_padding_mask", "src_key_padding_mask", "memory_key_padding_mask")
"""Arguments of torch's modules that are True where nothing is to be attended to."""


def _rows_kept(site: Site) -> Iterator[Edit]:
    """A mask that a module is given, without the rows that it would hide altogether."""
    for call in site.expressions:
        for arg in call.args if isinstance(call, cst.Call) else ():
            name = "" if arg.keyword is None else arg.keyword.value
            if name in _IS_MASKED and is_cheap(arg.value):
                made = built(site, "M & ~M.all(dim=-1, keepdim=True)", {"M": arg.value})
                yield Edit(
                    "rows that are masked altogether are not masked",
                    "The softmax of a row of nothing but -inf is NaN; what such a row attends to "
                    "is of no consequence.",
                    {arg.value: made},
                )


def _scaled_first(site: Site, root: cst.BaseExpression) -> Iterator[Edit]:
    """``s / 8`` of a product, or of something masked, done on what goes into that.

    Where `s` is assigned before, that assignment is changed, and all its uses lose the scale.
    """
    outer = site.term(root)
    if outer.op not in ("mul", "div") or not _is_number(site, outer.parameters["other"]):
        return
    scaled = outer.parameters["input"]
    binding = site.definition(scaled.node)
    inner = scaled if binding is None or binding.value is None else site.term(binding.value)
    if inner.op not in _SCALED_FIRST:
        return
    before = inner.parameters["input"].node
    made = changed(inner.node, {before: _scaled(site, outer, before)})
    changes: dict[cst.CSTNode, Change] = {root: like(root, made)}
    if binding is not None:
        every = [site.source.parents[use] for use in site.uses(binding)]
        if not all(same(each, root) for each in every):
            return  # somebody needs it unscaled
        if not site.unchanged(outer.parameters["other"].node, site.source.start(inner.node)):
            return
        changes = {inner.node: made, **dict(_unscaled(site, each, scaled.node) for each in every)}
    if any(site.source.covers(each, site.line) for each in changes):
        yield Edit(*_SCALED_FIRST[inner.op], changes)


def _unscaled(
    site: Site, outer: cst.CSTNode, name: cst.BaseExpression
) -> tuple[cst.CSTNode, Change]:
    """The name in place of the scaled one; ``s = s / 8`` goes altogether."""
    above = site.source.parents[outer]
    statement = site.source.statement(outer)
    assigned = isinstance(above, cst.Assign) and same(above.targets[0].target, name)
    return (statement, cst.RemoveFromParent()) if assigned and statement else (outer, name)


def _scaled(site: Site, outer: Term, node: cst.BaseExpression) -> cst.BaseExpression:
    """An operand with the scale of the outer operation."""
    sign = cst.Divide() if outer.op == "div" else cst.Multiply()
    made = cst.BinaryOperation(enclosed(node), sign, outer.parameters["other"].node)
    return made if isinstance(site.source.parents[node], cst.Arg) else enclosed(made)


def _is_number(site: Site, scale: Term) -> bool:
    """Whether what is scaled with is no tensor, as far as that can be seen."""
    if scale.op in _OF_NUMBERS:
        return all(_is_number(site, each) for each in scale.parameters.values())
    known = site.kinds(scale.node) <= {OTHER}
    return scale.is_constant or (not scale.op and known) or scale.op in ("sqrt", "pow", "rsqrt")


_OF_NUMBERS = ("add", "sub", "mul", "div", "square")
