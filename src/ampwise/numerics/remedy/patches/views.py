"""What an expression is a view or a part of: where its numbers were made."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from ampwise.numerics.remedy.patches.edit import widened
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import Change

_VIEWS = frozenset(
    ["gather", "squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "transpose",
     "permute", "t", "diagonal", "expand", "expand_as", "contiguous", "select", "narrow", "flip",
     "index_select", "take_along_dim", "movedim", "repeat", "clone", "roll", "split", "chunk",
     "unbind", "tensor_split"]
)  # fmt: skip
"""Operations that give numbers of their tensor as they are."""


def viewed(site: Site, node: cst.BaseExpression) -> cst.BaseExpression | None:
    """What an expression is a view or a part of; None where it computes something."""
    match node:
        case cst.Subscript(value=base):
            return base
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=name)) as func, args=args) if (
            name in _VIEWS
        ):
            return args[0].value if site.source.full(func) and args else func.value
        case _:
            return None


def outermost(site: Site, raised: dict[cst.CSTNode, Change]) -> dict[cst.CSTNode, Change]:
    """Casts without those inside of what is cast, and with one for all parts of a tensor."""
    nested = {each for each in raised if any(up in raised for up in site.source.up(each))}
    return raised_as_one(site, {e: to for e, to in raised.items() if e not in nested})


def raised_as_one(site: Site, raised: Mapping[cst.CSTNode, Change]) -> dict[cst.CSTNode, Change]:
    """Casts of all the parts that a tensor is taken into, as one cast of that tensor."""
    names = [each for each in raised if isinstance(each, cst.Name)]
    found: dict[cst.CSTNode, Change] = dict(raised)
    for each in names:
        if each not in found or (parts := site.parts_with(each)) is None:
            continue
        used = [one for one in names if site.parts_with(one) is parts]
        if {one.value for one in used} == set(parts.names) and len(parts.names) > 1:
            made = _made(site, parts.of)
            if made is parts.of:
                continue  # it may be a tuple
            for one in used:
                found.pop(one)
            found[made] = widened(site, made)
    return found


def _made(site: Site, node: cst.BaseExpression) -> cst.BaseExpression:
    """What is computed where an expression is a view of it; itself where it is none."""
    base = viewed(site, node)
    while base is not None:
        node = base
        binding = site.definition(node)
        value = None if binding is None else binding.value
        base = value if value is not None else viewed(site, node)
    return node
