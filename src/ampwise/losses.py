"""Losses that need less memory than their textbook form.

`linear_cross_entropy` is the last layer of a language model and its loss in one:

    z = hidden @ weight.T + bias            (rows, classes)
    loss_i = log(sum_j exp z_ij) - z_i,target_i

Written as two steps it keeps the logits z in the compute dtype and again in float32, and their
gradient: with 2,048 rows and 16,384 classes that is 300 MB, more than the rest of a small model.
Here the rows are taken in chunks. Forward keeps one number a row, the log of the sum; backward
computes each chunk's logits again, so the product with `weight` is made twice (three products
become four).

The gradient of the logits is multiplied by the incoming gradient in float32, before it is rounded
to the compute dtype. Under loss scaling that is what keeps small float16 gradients: computing them
in forward, where the scale is not known yet, would round them to zero. Sums over chunks are taken
in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 21
"""Logits in a chunk, if nobody says otherwise: 8 MB in float32."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)`` without all the logits.

    Parameters
    ----------
    hidden
        Any shape (..., width), floating point.
    weight
        Shape (classes, width).
    target
        Class indices, of `hidden`'s shape without its last dimension.
    bias
        Shape (classes,).
    ignore_index
        Rows with this target count for nothing.
    label_smoothing
        Share of the target that is spread over all classes, 0 to 1.
    reduction
        ``mean`` over the rows that count (NaN if none does, as in torch), or ``sum``.
    chunk_rows
        Rows taken at once; None: as many as make two million logits.

    Returns
    -------
    Tensor
        A float32 scalar (float64 for float64 input). Inside autocast the products run in the
        autocast dtype, as those of `F.linear` do.

    Raises
    ------
    ValueError
        For shapes or settings that do not fit; the message names them.
    """
    _check(hidden, weight, target, label_smoothing, reduction, chunk_rows)
    rows = chunk_rows or max(1, _CHUNK_ELEMENTS // max(1, weight.size(0)))
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    flat, targets = hidden.reshape(-1, hidden.size(-1)), target.reshape(-1)
    total: Any = _LinearCrossEntropy.apply(
        flat, weight, bias, targets, ignore_index, label_smoothing, rows, dtype
    )
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().to(total.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        exact = _exact(hidden.dtype)
        head = weight.to(dtype)
        logs = torch.empty(len(target), dtype=exact, device=hidden.device)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        for part in _chunks(len(target), rows):
            logits = _logits(hidden[part], head, bias, dtype, exact)
            logs[part] = torch.logsumexp(logits, 1)
            counted = target[part] != ignore_index
            chosen = target[part].masked_fill(~counted, 0)
            picked = logits.gather(1, chosen[:, None])[:, 0]
            losses = logs[part] - (1 - smoothing) * picked
            if smoothing:
                losses = losses - smoothing * logits.mean(1)
            total += losses.masked_fill(~counted, 0.0).sum()
        ctx.save_for_backward(hidden, weight, bias, target, logs)
        ctx.settings = (ignore_index, smoothing, rows, dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = grad_outputs
        hidden, weight, bias, target, logs = ctx.saved_tensors
        ignore_index, smoothing, rows, dtype = ctx.settings
        exact = logs.dtype
        head = weight.to(dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(target), rows):
                logits = _logits(hidden[part], head, bias, dtype, exact)
                counted = (target[part] != ignore_index)[:, None]
                chosen = target[part, None].masked_fill(~counted, 0)
                d_logits = logits.sub_(logs[part, None]).exp_()
                d_logits.scatter_add_(1, chosen, torch.full_like(logs[part, None], smoothing - 1))
                if smoothing:
                    d_logits -= smoothing / weight.size(0)
                d_logits *= gradient.to(exact) * counted
                low = d_logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[part] = (low @ head).to(hidden.dtype)
                if d_weight is not None:
                    d_weight += low.T @ hidden[part].to(dtype)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *[None] * 5,
        )


def _logits(
    hidden: Tensor, head: Tensor, bias: Tensor | None, dtype: torch.dtype, exact: torch.dtype
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        low = F.linear(hidden.to(dtype), head, None if bias is None else bias.to(dtype))
        return low.to(exact, copy=True)


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, count, rows))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduction: str,
    chunk_rows: int | None,
) -> None:
    if weight.dim() != 2 or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"weight: expected shape (classes, {hidden.size(-1)}) for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target: expected shape {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    if target.is_floating_point():
        raise ValueError(f"target: expected class indices, got {target.dtype}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', got {reduction!r}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected a positive number, got {chunk_rows}")
