"""A gradient that forward asks for (`torch.autograd.grad`), where no loss scale lifts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampwise.numerics.remedy.patches.edit import Edit, enclosed, method, replaced
from ampwise.numerics.remedy.patches.island import names_bound, names_read, span
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import Change, changed, code_of, dotted, walk
from ampwise.numerics.result import INNER_SCALE

_ASKS = "torch.autograd.grad"
_WHY = "No loss scale reaches a gradient that forward asks for: its small numbers end as 0."
_FACTOR = cst.Integer(str(INNER_SCALE))
_MOST = 6
"""Statements of an island."""


def scaled(site: Site) -> Iterator[Edit]:
    """The gradient of a multiple of the value, divided by the factor."""
    for call in _asked(site):
        value = _value(call)
        after = None if value is None else _divided(site, call)
        if value is not None and after is not None:
            made = method(value, "float") if _may_be_half(site, value) else enclosed(value)
            times = cst.BinaryOperation(made, cst.Multiply(), _FACTOR)
            what = f"the gradient of {INNER_SCALE} times the value, divided by that"
            yield Edit(what, _WHY, _with(site, value, times, after))


def islands(site: Site) -> Iterator[Edit]:
    """The statements from where the value is made to the gradient, in float32."""
    above = None if site.statement is None else site.source.parents[site.statement]
    if not isinstance(above, cst.IndentedBlock):
        return
    body = list(above.body)
    at = next(number for number, each in enumerate(body) if each is site.statement)
    for call in _asked(site):
        inputs = set[str]() if len(call.args) < 2 else {dotted(call.args[1].value)}
        first = at
        for number in range(at - 1, max(-1, at - _MOST), -1):
            bound, needed = names_bound(site, [body[number]]), _needs(site, body[first : at + 1])
            simple = isinstance(body[number], cst.SimpleStatementLine)
            if not simple or bound & inputs or not bound & needed:
                break
            first = number
        if first < at:
            yield span(site, body[first : at + 1], body[at + 1 :])


def _needs(site: Site, part: Sequence[cst.BaseStatement]) -> set[str]:
    return {name for each in part for name in names_read(site, each)}


def _asked(site: Site) -> list[cst.Call]:
    if site.cause not in ("UNDERFLOW", "PRECISION_LOSS") or site.statement is None:
        return []
    calls = walk(site.statement, cst.Call)
    return [each for each in calls if site.source.full(each.func) == _ASKS]


def _value(call: cst.Call) -> cst.BaseExpression | None:
    """What a call asks the gradient of; None where these are several."""
    named = [each for each in call.args if each.keyword is None or each.keyword.value == "outputs"]
    if not named or isinstance(named[0].value, cst.Tuple | cst.List):
        return None
    return named[0].value


def _may_be_half(site: Site, value: cst.BaseExpression) -> bool:
    """Whether it may be in 16 bits: a name in it is, or it calls what is none of torch's."""
    if any(not site.term(each).op for each in walk(value, cst.Call)):
        return True
    names = [each for kind in (cst.Attribute, cst.Name) for each in walk(value, kind)]
    return any(map(site.is_half, names))


def _divided(site: Site, call: cst.Call) -> tuple[cst.CSTNode, cst.BaseStatement | None] | None:
    """How what a call gives is divided: the expression, or the statement after; None if neither."""
    above = site.source.parents[call]
    if isinstance(above, cst.Subscript):
        return above, None
    statement = site.statement
    if not isinstance(above, cst.Assign) or not isinstance(statement, cst.SimpleStatementLine):
        return None
    target = above.targets[0].target
    if len(above.targets) > 1 or not isinstance(target, cst.Tuple):
        return None
    names = [code_of(each.value) for each in target.elements]
    values = ", ".join(f"{each} / {INNER_SCALE}" for each in names)
    divides = cst.parse_statement(f"{', '.join(names)} = {values}\n")
    return statement, divides


def _with(
    site: Site, value: cst.BaseExpression, times: cst.BaseExpression,
    after: tuple[cst.CSTNode, cst.BaseStatement | None],
) -> dict[cst.CSTNode, Change]:  # fmt: skip
    """The changes of a value and of what is made of it."""
    node, divides = after
    if divides is None:
        assert isinstance(node, cst.Subscript)
        gives = changed(node, {value: times})
        return replaced(site, node, cst.BinaryOperation(gives, cst.Divide(), _FACTOR))
    assert isinstance(node, cst.SimpleStatementLine)
    return {node: cst.FlattenSentinel([changed(node, {value: times}), divides])}
