"""Formats that are written in a file, or taken over from a tensor, and what asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.edit import method
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import Change, dotted, walk

_NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
_LIKE = tuple(f"torch.{each}_like" for each in ("zeros", "ones", "full", "empty", "rand", "randn"))
_EXACT = ("torch.eye", "torch.zeros", "torch.ones")
"""Tensors whose numbers every format holds: in a formula, theirs only changes that of others."""
_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
ASKED = ("dtype", "device", "shape", "ndim", "dim", "size", "numel")
"""What may be asked of a tensor without its numbers."""


def wide(site: Site, node: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that make casts to 16 bits in an expression casts to float32."""
    changes: dict[cst.CSTNode, Change] = {}
    for name in walk(node, cst.Attribute):
        if _is_half_format(site, name):
            changes[name] = float32(site)
        elif name.attr.value in ("half", "bfloat16") and _is_method(site, name):
            changes[name.attr] = cst.Name("float")
    return changes


def float32(site: Site) -> cst.BaseExpression:
    """``torch.float32``, as the file spells it."""
    return cst.parse_expression(site.source.spelled("torch.float32"))


def _is_method(site: Site, name: cst.Attribute) -> bool:
    above = site.source.parents[name]
    return isinstance(above, cst.Call) and above.func is name and not site.source.full(name)


def taken_over(site: Site, expressions: Iterable[cst.BaseExpression]) -> dict[cst.CSTNode, Change]:
    """Changes of a format that is given as a name, or that of another tensor: ``x.dtype``.

    Only for expressions that make a tensor in that format, where this is a 16-bit one.
    """
    changes: dict[cst.CSTNode, Change] = {}
    wider = float32(site)
    for node in expressions:
        if not isinstance(node, cst.Call) or _only_promotes(site, node):
            continue
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        for arg in node.args:
            positional = arg.keyword is None and name == "to" and arg is node.args[0]
            named = arg.keyword is not None and arg.keyword.value == "dtype"
            if (positional or named) and is_a_dtype(arg.value):
                changes[arg.value] = wider
        if name == "to" and node.args and site.is_half(other := node.args[0].value):
            assert isinstance(node.func, cst.Attribute)  # it goes to the device of the other, too
            device = cst.Attribute(other, cst.Name("device"))
            changes[node] = method(node.func.value, "to", device, wider)
        elif name == "type_as":
            assert isinstance(node.func, cst.Attribute)
            changes[node] = method(node.func.value, "float")
    return changes


def named_formats(site: Site, scope: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that write float32 where a tensor is made in a format that has a name for 16 bits.

    Such as an argument of a constructor with a default, and the attribute that keeps it: changed by
    themselves, all that is made in the format would be float32.
    """
    names = _names_for_half(site, scope)
    wider = float32(site)
    return {
        arg.value: wider
        for call in walk(scope, cst.Call)
        for arg in call.args
        if _last(arg.value) in names and _gives_a_format(arg, call)
    }


def _gives_a_format(arg: cst.Arg, call: cst.Call) -> bool:
    if arg.keyword is not None:
        return arg.keyword.value == "dtype" and dotted(call.func) != "dict"
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in ("to", "type")


def _names_for_half(site: Site, scope: cst.CSTNode) -> set[str]:
    """Names of arguments, attributes and keys that are given a 16-bit format, or such a name."""
    given = list(_given(scope))
    names: set[str] = set()
    for _ in given:
        more = {name for name, to in given if _is_half_format(site, to) or _last(to) in names}
        if more == names:
            break
        names = more
    return names - {""}


def _given(scope: cst.CSTNode) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Names, attributes of ``self`` and keys, each with what it is given."""
    for node in walk(scope, cst.CSTNode):
        match node:
            case cst.Param(name=cst.Name(value=name), default=value) if value is not None:
                yield name, value
            case cst.Assign(targets=[cst.AssignTarget(target=target)], value=value):
                yield _last(target), value
            case cst.DictElement(key=cst.SimpleString() as key, value=value):
                yield str(key.evaluated_value), value
            case cst.Call(func=cst.Name(value="dict"), args=args):
                for each in args:
                    if each.keyword is not None:
                        yield each.keyword.value, each.value
            case _:
                pass


def _is_half_format(site: Site, node: cst.BaseExpression) -> bool:
    full = site.source.full(node)
    return full.startswith("torch.") and full.removeprefix("torch.") in (*HALF, "half")


def _last(node: cst.BaseExpression) -> str:
    """What a name, an attribute of ``self`` or a key is called; empty for anything else."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=cst.Name(value="self"), attr=cst.Name(value=name)):
            return name
        case cst.Subscript(
            slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))]
        ):
            return str(key.evaluated_value)
        case _:
            return ""


def _only_promotes(site: Site, node: cst.Call) -> bool:
    in_formula = isinstance(site.source.parents.get(node), cst.BinaryOperation)
    return in_formula and site.source.full(node.func) in _EXACT


def made_like(site: Site, node: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that make tensors in float32 that are made like one with 16 bits."""
    dtype = cst.Arg(float32(site), cst.Name("dtype"), equal=_TIGHT)
    return {
        each: each.with_changes(args=[*each.args, dtype])
        for each in walk(node, cst.Call)
        if _is_made_like(site, each)
    }


def _is_made_like(site: Site, call: cst.Call) -> bool:
    """Whether a tensor is made in the format of one with 16 bits, for want of another."""
    if any(each.keyword is not None and each.keyword.value == "dtype" for each in call.args):
        return False
    if isinstance(call.func, cst.Attribute) and call.func.attr.value in _NEW:
        return site.is_half(call.func.value)
    if site.source.full(call.func) not in _LIKE or not call.args:
        return False
    other = call.args[0].value
    return site.is_half(other.value if isinstance(other, cst.Subscript) else other)


def of_half(
    site: Site, changes: Mapping[cst.CSTNode, Change]
) -> dict[cst.CSTNode, Change]:  # fmt: skip
    """Those of changes of a format that take over that of a tensor seen to have 16 bits."""
    return {
        node: to
        for node, to in changes.items()
        if isinstance(node, cst.Call)
        or (isinstance(node, cst.Attribute) and site.is_half(node.value))
    }


def only_asked(site: Site, name: str) -> bool:
    """Whether a tensor is only asked for its format, device or shape in the function."""
    found = uses(site, name)
    return bool(found) and all(asked_for(site, each) for each in found)


def formats_asked(site: Site, names: Iterable[str]) -> dict[cst.CSTNode, Change]:
    """Changes that write float32 where tensors are asked for their format."""
    wider = float32(site)
    return {
        site.source.parents[use]: wider
        for name in names
        for use in uses(site, name)
        if asked_for(site, use) == "dtype"
    }


def uses(site: Site, name: str) -> list[cst.Name]:
    """Where a name is read in the function, whatever it holds there."""
    named = [each for each in walk(site.scope, cst.Name) if each.value == name]
    return [e for e in named if e in site.source.positions and not site.is_label(e)]


def asked_for(site: Site, use: cst.Name) -> str:
    """What of a tensor is asked for where its name is used; empty for its numbers."""
    match site.source.parents[use]:
        case cst.Attribute(value=value, attr=cst.Name(value=asked)) if value is use:
            return asked if asked in ASKED else ""
        case _:
            return ""


def is_a_dtype(node: cst.BaseExpression) -> bool:
    """Whether an expression is called a format: ``x.dtype``, ``dtype``."""
    return dotted(node).rpartition(".")[2] == "dtype"
