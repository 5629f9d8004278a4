"""One operation in float64: on the actual inputs, or on what they would be without rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.numerics.observe.attention import by_formula, is_attention
from ampwise.numerics.observe.operations import arguments_by_name, operation, written

HALF = (torch.float16, torch.bfloat16)
FLOATS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
"""Formats that values are compared in."""


class UnsupportedError(Exception):
    """The operation has no float64 form."""


def exact(
    func: Any, args: Any, kwargs: Any, result: Any = None, *, discrete: bool = False
) -> list[Tensor]:
    """An operation in float64, on inputs that are raised to it; in-place ones on copies.

    Parameters
    ----------
    result
        What the actual run gave, for the random draws that are followed.
    discrete
        Give the integers and masks that it writes, not the numbers.

    Returns
    -------
    list of Tensor
        The written arguments and results, as `operations.written` lists them.

    Raises
    ------
    UnsupportedError
        When there is no such form.
    """
    name = func._overloadpacket.__name__
    if name in _SPECIAL and not discrete:
        return _SPECIAL[name](args, kwargs, result)
    if _draws(func, name, args, kwargs) or name in _NO_FORM or "foreach" in name:
        raise UnsupportedError(name)
    if is_attention(name):
        return by_formula(func, args, kwargs, torch.float64)
    args, kwargs = tree_map(_raise, args), tree_map(_raise, kwargs)
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)
    try:
        made = func(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError) as error:  # an index that is another there
        raise UnsupportedError(name) from error
    return written(operation(func), args, kwargs, made, discrete=discrete)


def _draws(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if not is_attention(name):
        return True
    return float(arguments_by_name(func, args, kwargs).get("dropout_p", 0.0)) > 0


def _raise(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.float64, copy=True) if value.is_floating_point() else value
    return torch.float64 if value in FLOATS and isinstance(value, torch.dtype) else value


def _dropout(args: Any, _kwargs: Any, result: Any) -> list[Tensor]:
    values, share = args[0].double(), float(args[1])
    if result is None:
        raise UnsupportedError("native_dropout")
    mask = result[1]
    return [values * mask / (1 - share) if share < 1 else values * 0]


def _recast(args: Any, kwargs: Any, _result: Any) -> list[Tensor]:
    dtype = kwargs.get("dtype") or args[0].dtype
    if not dtype.is_floating_point:
        raise UnsupportedError("_to_copy")
    return [args[0].to(torch.float64, copy=True)]


def _scaled_product(args: Any, kwargs: Any, _result: Any) -> list[Tensor]:
    """A product of float8 by the inverses of its operands' scales."""
    given = arguments_by_name(torch.ops.aten._scaled_mm.default, args, kwargs)
    left, right, bias = given["self"], given["mat2"], given.get("bias")
    scaled = left.double() * given["scale_a"].double(), right.double() * given["scale_b"].double()
    made = scaled[0] @ scaled[1]
    return [made if bias is None else made + bias.double()]


_SPECIAL: dict[str, Callable[[Any, Any, Any], list[Tensor]]] = {
    "native_dropout": _dropout,
    "_to_copy": _recast,
    "_scaled_mm": _scaled_product,
}
_NO_FORM = frozenset(
    ["_local_scalar_dense", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_",
     "nextafter", "view", "_unsafe_view"]
)  # fmt: skip
