"""Casts that change nothing once they are to float32, as what they cast is in it: left out."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from ampwise.numerics.remedy.patches.edit import cast_of, comments, comments_moved, said
from ampwise.numerics.remedy.patches.site import OTHER, Site
from ampwise.numerics.remedy.patches.source import Change, changed
from ampwise.numerics.remedy.patches.terms import ELEMENTWISE, TENSORS, Term
from ampwise.numerics.remedy.patches.views import viewed

_WHOLE = ("int64", "int32", "int16", "int8", "uint8", "bool")


def without_casts(
    site: Site, changes: Mapping[cst.CSTNode, Change]
) -> tuple[Mapping[cst.CSTNode, Change], bool]:  # fmt: skip
    """The same changes with casts of what is float32 left out, and whether all were such."""
    calls = {node: _idle_cast(site, node) for node in changes}
    left: dict[cst.CSTNode, Change] = {}
    idle = 0
    for statement in dict.fromkeys(map(site.source.statement, changes)):
        own = {e: to for e, to in changes.items() if site.source.statement(e) is statement}
        less: dict[cst.CSTNode, Change] = {
            call: _instead(site, call) for each in own if (call := calls[each])
        }
        if len(less) < len(own):
            left |= own
            continue
        idle += len(own)
        if isinstance(statement, cst.SimpleStatementLine):
            made = changed(statement, less)
            if (saying := said(made)) is None:
                block = site.source.parents[statement]
                if not isinstance(block, cst.IndentedBlock) or len(block.body) == 1:
                    return changes, False  # nothing would be left in it
                less = {statement: cst.RemoveFromParent()}
            elif saying is not made:
                less = {statement: saying}
        left |= less
    return left | comments_moved(site, left), idle == len(changes)


def _idle_cast(site: Site, node: cst.CSTNode) -> cst.Call | None:
    """The call around a format, where it is a cast of what is float32."""
    around = (node, *site.source.up(node))
    call = next((each for each in around if isinstance(each, cst.Call)), None)
    value = None if call is None else cast_of(call)
    if call is None or value is None:
        return None
    seen = any(site.source.covers(call, line) for line in site.casts_of_float32)
    return call if seen or _is_float32(site, site.term(value)) else None


def _instead(site: Site, call: cst.Call) -> cst.BaseExpression:
    """What a call casts, without parentheses that only the call needed."""
    value = cast_of(call)
    assert value is not None
    bound = isinstance(site.source.parents[call], cst.BaseExpression) or len(value.lpar) != 1
    return value if bound or comments(value) else value.with_changes(lpar=(), rpar=())


def _is_float32(site: Site, term: Term) -> bool:
    """Whether a name holds float32, or a formula is of such, of casts to it and of numbers only."""
    if term.op in ELEMENTWISE:
        given = [each for each in map(term.get, TENSORS) if each is not None]
        tensors = [e for e in given if not _is_number(site, e) and not _is_whole(site, e)]
        return bool(tensors) and all(_is_float32(site, each) for each in tensors)
    if (base := viewed(site, term.node)) is not None:
        return _is_float32(site, site.term(base))
    match term.node:
        case cst.Attribute(value=whole, attr=cst.Name(value="real" | "imag")):
            return site.kinds(whole) == {"complex64"}
        case cst.Call(func=cst.Attribute(attr=cst.Name(value="float")), args=[]):
            return True
        case _:
            return site.kinds(term.node) == {"float32"}


def _is_number(site: Site, term: Term) -> bool:
    """Whether it is a number that is no tensor."""
    return term.is_constant or site.kinds(term.node) == {OTHER}


def _is_whole(site: Site, term: Term) -> bool:
    """Whether a name holds whole numbers, or a formula is of such: they are in no format."""
    if term.op in ("add", "sub", "mul", "neg", "abs"):
        given = [each for each in map(term.get, TENSORS) if each is not None]
        return all(isinstance(each.value, int) or _is_whole(site, each) for each in given)
    kinds = site.kinds(term.node)
    return bool(kinds) and kinds <= set(_WHOLE)
