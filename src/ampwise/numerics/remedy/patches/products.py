"""What autocast makes in 16 bits, whatever it is given: products of matrices."""

from __future__ import annotations

import builtins

import libcst as cst
import torch

from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import dotted, walk
from ampwise.products import LOWERED

_PRODUCTS = LOWERED | {"dot", "bilinear", "cdist", "tensordot"}


def multiplies(site: Site, node: cst.CSTNode) -> bool:
    """Whether a product of matrices is in a node."""
    calls = (site.source.full(each.func) or dotted(each.func) for each in walk(node, cst.Call))
    names = {each.rpartition(".")[2] for each in calls}
    methods = {each.func.attr.value for each in walk(node, cst.Call)
               if isinstance(each.func, cst.Attribute)}  # fmt: skip
    return bool((names | methods) & _PRODUCTS) or any(walk(node, cst.MatrixMultiply))


def may_multiply(site: Site, node: cst.CSTNode) -> bool:
    """Whether one may be: also in a function that is called, which nobody looks into."""
    return multiplies(site, node) or not all(_is_known(site, c) for c in walk(node, cst.Call))


def _is_known(site: Site, call: cst.Call) -> bool:
    """Whether what is called is torch's or Python's own."""
    full = site.source.full(call.func) or dotted(call.func)
    if full.partition(".")[0] in ("torch", "math"):
        return True
    if isinstance(call.func, cst.Attribute):
        of_self = dotted(call.func) == f"self.{call.func.attr.value}"
        return not of_self and hasattr(torch.Tensor, call.func.attr.value)
    return hasattr(builtins, full)
