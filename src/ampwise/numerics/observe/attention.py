"""Inside fused attention: the operations it stands for, one by one.

To the dispatcher a fused kernel is one operation, and most have no float64 form. What one was given
is computed again by its formula,

    P = softmax(scale Q K^T + mask)    O = P V
    dV = P^T dO    dS = P (dO V^T - rowsum(P dO V^T))    dQ = scale dS K    dK = scale dS^T Q

in float64 as a reference, and in float32, in which the kernels keep scores and softmax, to see
which operation broke: the first with a bad value that its inputs do not account for. A row that is
masked completely gives zeros, as in PyTorch's own kernels. Dropout is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.numerics.observe.bits import all_bits
from ampwise.numerics.observe.operations import (
    FILLS,
    arguments_by_name,
    copied,
    operation,
    tensors,
    written,
)
from ampwise.numerics.observe.roots import Root


def is_attention(name: str) -> bool:
    """Whether an operation is a fused attention, or its backward."""
    return "scaled_dot_product" in name


def inside(root: Root) -> Root | None:
    """The operation of a fused attention that first broke; None for others, and if none did."""
    if root.func is None or not is_attention(root.name):
        return None
    with _First(root) as first:
        by_formula(root.func, root.args, root.kwargs, torch.float32)
    return first.found


def mask_of(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What a fused attention adds to its scores, or (bool) selects them by; None without any."""
    given = arguments_by_name(func, args, kwargs)
    mask = given.get("attn_mask", given.get("attn_bias"))
    return mask if isinstance(mask, Tensor) and mask.numel() else None


def by_formula(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> list[Tensor]:
    """Output of a fused attention; of its backward the gradients of query, key and value."""
    given = arguments_by_name(func, args, kwargs)
    query, key, value = (given[name].detach().to(dtype) for name in ("query", "key", "value"))
    shared = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if shared > 1:  # several heads of the query share one of key and value
        key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * scale
    if given.get("is_causal"):
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    mask = mask_of(func, args, kwargs)
    if mask is not None:
        masks = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if masks else scores + mask.to(dtype)
    weights = torch._safe_softmax(scores, -1)
    gradient = next((each for name, each in given.items() if name.startswith("grad_out")), None)
    if gradient is None:
        return [weights @ value]
    gradient = gradient.detach().to(dtype)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    found = [of_scores @ key, of_scores.mT @ query, weights.mT @ gradient]
    if shared > 1:
        found[1:] = (each.unflatten(-3, (-1, shared)).sum(-3) for each in found[1:])
    return found


class _First(TorchDispatchMode):
    """Keeps the first operation that breaks."""

    def __init__(self, fused: Root) -> None:
        super().__init__()
        self.found: Root | None = None
        self._fused = fused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op, result = operation(func), func(*args, **kwargs)
        if self.found is None and op.name not in FILLS and not op.empty:
            results = written(op, args, kwargs, result)
            bits = all_bits(results)
            if bits & ~all_bits(tensors((args, kwargs))):
                given, named = copied((args, kwargs))
                self.found = Root(
                    self._fused.index, op.name, self._fused.place, bits, func=func, args=given,
                    kwargs=named, outputs=[each.detach().clone() for each in results],
                )  # fmt: skip
        return result
