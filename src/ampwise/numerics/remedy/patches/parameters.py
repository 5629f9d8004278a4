"""Parameters in float32: the line that makes them in 16 bits, without its format.

Autocast computes in 16 bits whatever the format of a parameter is, so most code needs no more than
that a cast is left out, or a ``dtype``. Where it relies on what such a parameter gives, as where it
writes into a tensor in 16 bits, the cast is put where the parameter is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.edit import (
    Edit,
    comments_moved,
    enclosed,
    like,
    method,
    said,
    separable,
)
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import Change, dotted, walk
from ampwise.numerics.remedy.patches.written import taken_over, wide

WHY = "In float32 a small update is not lost beside a weight; autocast computes in 16 bits anyway."
_TURNED = ("t", "T", "mT", "transpose", "reshape", "view")
"""Methods and attributes of a parameter that give all of it."""


def edits(site: Site) -> Iterator[Edit]:
    """Float32 for what the line makes, the least first."""
    left_out = without(site)
    if left_out:
        yield Edit("parameters in float32: no 16-bit format where they are made", WHY, left_out)
    around = None if site.function is None else site.source.class_around(site.function)
    here, uses = _here(site), _uses(site, around)
    if uses and (made := left_out or here):
        what = "parameters in float32, and a cast to 16 bits where they are used"
        yield Edit(what, WHY, {**made, **uses})
    what = "parameters in float32 where they are made"
    if here:
        yield Edit(what, WHY, here)
    for scope in (site.function, around):
        if scope is not None and (changes := wide(site, scope)):
            yield separable(what, WHY, changes)
    if changes := taken_over(site, site.expressions):
        yield Edit(what, WHY, changes)


def _here(site: Site) -> dict[cst.CSTNode, Change]:
    return {} if site.statement is None else wide(site, site.statement)


# -- a format that is left out ---------------------------------------------------------------------


def without(site: Site) -> dict[cst.CSTNode, Change]:
    """Changes that leave 16-bit formats of a statement out; with them what says nothing then."""
    statement = site.statement
    if not isinstance(statement, cst.SimpleStatementLine):
        return {}
    dropping = _Dropping(site)
    less = statement.visit(dropping)
    if not dropping.dropped:
        return {}
    assert isinstance(less, cst.SimpleStatementLine)
    if (left := said(less)) is not None:
        return {statement: left}
    block = site.source.parents[statement]
    if isinstance(block, cst.IndentedBlock) and len(block.body) == 1:
        loop = site.source.parents[block]
        if not isinstance(loop, cst.For) or loop.orelse is not None:
            return {}
        statement = loop
    changes: dict[cst.CSTNode, Change] = {statement: cst.RemoveFromParent()}
    return changes | comments_moved(site, changes)


class _Dropping(cst.CSTTransformer):
    """Leaves casts to 16 bits out, and arguments that are 16-bit formats."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.dropped = 0
        self._site = site

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802 - libcst's name
        """A call without these, if a part of it is on the line; of a cast only what it casts."""
        if not self._site.source.covers(original_node, self._site.line):
            return updated_node
        given = list(zip(original_node.args, updated_node.args, strict=True))
        left = [now for before, now in given if not self._is_format(before, original_node)]
        dropped = len(given) - len(left)
        func = updated_node.func
        if not isinstance(func, cst.Attribute) or self._site.source.full(original_node.func):
            self.dropped += dropped
            return _with_args(updated_node, left) if dropped else updated_node
        name = func.attr.value
        named = name in ("half", "bfloat16") and not given
        self.dropped += dropped or named
        if named or (dropped and not left and name in ("to", "type")):
            return like(updated_node, enclosed(func.value))
        return _with_args(updated_node, left) if dropped else updated_node

    def _is_format(self, arg: cst.Arg, call: cst.Call) -> bool:
        """Whether an argument is a 16-bit format: ``dtype=``, or what a tensor is cast to."""
        if self._site.source.full(arg.value).removeprefix("torch.") not in (*HALF, "half"):
            return False
        if arg.keyword is not None:
            return arg.keyword.value == "dtype"
        return isinstance(call.func, cst.Attribute) and call.func.attr.value in ("to", "type")


def _with_args(call: cst.Call, left: Sequence[cst.Arg]) -> cst.Call:
    """A call with some of its arguments, the last laid out as its last one was."""
    last = call.args[-1]
    if left and left[-1] is not last:
        comma, white = last.comma, last.whitespace_after_arg
        left = [*left[:-1], left[-1].with_changes(comma=comma, whitespace_after_arg=white)]
    return call.with_changes(args=left)


# -- a format that is kept where a parameter is used -----------------------------------------------


def _uses(site: Site, around: cst.ClassDef | None) -> dict[cst.CSTNode, Change]:
    """Casts to the format that a parameter had, in the class that makes it."""
    if around is None or not isinstance(site.statement, cst.SimpleStatementLine):
        return {}
    half = cst.parse_expression(site.source.spelled(f"torch.{site.dtype}"))
    changes: dict[cst.CSTNode, Change] = {}
    for assigned in walk(site.statement, cst.Assign):
        name = dotted(assigned.targets[0].target)
        if not name.startswith("self.") or name.count(".") > 1:
            continue
        is_parameter = any(
            site.source.full(each.func).endswith(".Parameter")
            for each in walk(assigned.value, cst.Call)
        )
        for node in walk(around, cst.Attribute):
            if dotted(node) != name or site.source.inside(node, site.statement):
                continue
            above = site.source.parents[node]
            if is_parameter and _is_read(above, node):
                changes[node] = method(node, "to", half)
            elif not is_parameter and isinstance(above, cst.Call) and above.func is node:
                changes[above] = method(above, "to", half)
    return changes


def _is_read(above: cst.CSTNode, node: cst.Attribute) -> bool:
    """Whether a parameter is read as a whole."""
    match above:
        case cst.Attribute(value=value, attr=attr):
            return value is node and attr.value in _TURNED
        case cst.AssignTarget() | cst.AugAssign() | cst.AnnAssign() | cst.Del():
            return False
        case _:
            return True
