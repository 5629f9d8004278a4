"""The lever ``unfused-attention``: attention by matrix products and a softmax, not by one kernel.

PyTorch's fused kernel keeps no scores and computes them in float32. On CPUs with fast 16-bit
products its blocks are too small for these: at a few hundred positions two large products and a
softmax between them take less time (docs/tune.md has figures), and memory for the scores. Causal
attention goes in blocks of queries, each with the keys up to its end. Under
autocast these are in its 16-bit format, 8 significant bits in bfloat16, where the kernel has
float32's 24; parity says whether that matters.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.step.precision import CallMode

_NAME = "scaled_dot_product_attention"
_FEWEST_ROWS, _MOST_ROWS = 128, 256
"""Of a block of causal attention: fewer make products small, more compute what the mask drops."""


def calls_attention(module: nn.Module) -> bool:
    """Whether a module's own code names attention, or a function of the same file that it calls.

    PyTorch's modules do not count: they reach the kernel from inside, where no mode sees it.
    """
    return any(map(_names_attention, type(module).__mro__))


@cache
def _names_attention(kind: type) -> bool:
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    methods = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
    helpers = [each for method in methods for each in _helpers(method)]
    return any(_NAME in each.__code__.co_names for each in (*methods, *helpers))


def _helpers(method: types.FunctionType) -> Iterator[types.FunctionType]:
    for name in method.__code__.co_names:
        found = method.__globals__.get(name)
        if isinstance(found, types.FunctionType) and found.__module__ == method.__module__:
            yield found


@cache
def unfused(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of modules whose attention is by products; copies and islands work as before."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _ByProducts():
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _ByProducts(CallMode):
    """Calls attention by products where it can be, and the kernel elsewhere."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call."""
        return (by_products if func is F.scaled_dot_product_attention else func)(*args, **kwargs)


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, of shapes (..., length, width) as there.

    With a mask, dropout or grouped queries it is that kernel.
    """
    if attn_mask is not None or dropout_p or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    with torch.autocast(kind, enabled=False):  # it would raise the softmax to float32
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = (query * factor).contiguous(), key.contiguous(), value.contiguous()
        if not is_causal:
            return _attended(query, key, value)
        rows = min(max(_FEWEST_ROWS, math.ceil(query.shape[-2] / 2)), _MOST_ROWS)
        end, out = 0, list[Tensor]()
        for block in query.split(rows, -2):
            begin, end = end, end + block.shape[-2]
            all_seen = end >= key.shape[-2]  # a slice of all would cost a copy in backward
            seen = (key, value) if all_seen else (key[..., :end, :], value[..., :end, :])
            out.append(_attended(block, *seen, begin))
        return torch.cat(out, -2)


def _attended(query: Tensor, key: Tensor, value: Tensor, begin: int | None = None) -> Tensor:
    """Attention of queries; causal where they are those from a position `begin` on."""
    scores = query @ key.transpose(-2, -1)
    if begin is not None:
        later = scores[..., begin:]
        mask = torch.full(later.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device)
        later.add_(mask.triu_(1))
    return scores.softmax(-1) @ value
