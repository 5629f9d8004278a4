"""The gradients of an optimizer as a flat list of dense tensors, and their norm.

The norm answers two questions with one pass over the gradients: how long is the gradient, and is
any element inf or NaN? A sum of squares that is finite proves that every element is. One that is
not finite proves nothing in float32: (2e19)**2 overflows although 2e19 is a fine number. So

- on accelerators squares are summed in float64 (the foreach kernel reads float32 and accumulates
  float64 at memory speed): for float32 input it overflows only if an element is not finite;
- on the CPU, where float64 accumulation costs three times the pass, squares are summed in float32,
  and only a sum that overflowed is looked at again in float64. The memory is the host's own, so
  looking costs no synchronisation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

_DOT_FROM = 16_384  # elements: from here one BLAS dot product beats the foreach norm on CPUs


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Dense views of all gradients of some optimizers, each parameter once.

    Sparse gradients are coalesced (an uncoalesced one lists an element several times, so its
    norm would be wrong) and stand in the list as their values; complex ones as pairs of reals.
    """
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found[id(parameter)] = _dense(parameter)
    return list(found.values())


def _dense(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            gradient = parameter.grad = gradient.coalesce()
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Tensors grouped by the device they are on; empty ones are left out."""
    groups: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            groups[tensor.device].append(tensor)
    return groups


def norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Global L2 norm, a scalar on `device`; finite if and only if every element is finite.

    float32 where the sum of squares fits, else float64. No host synchronisation.
    """
    norms: list[Tensor] = []
    for place, tensors in by_device(gradients).items():
        if place.type == "cpu":
            norms += _norms_on_cpu(tensors)
        else:
            norms += _norms_in_float64(tensors)
    if len(norms) == 1:
        return norms[0].to(device)
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([each.to(device, torch.float64) for each in norms]))


def _norms_in_float64(tensors: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(tensors, 2, dtype=torch.float64)


def _norms_on_cpu(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Per-tensor norms in float32, or in float64 when a float32 sum of squares overflowed."""
    large = [tensor for tensor in tensors if _suits_dot(tensor)]
    small = [tensor for tensor in tensors if not _suits_dot(tensor)]
    norms: list[Tensor] = []
    if large:
        flat = [tensor.view(-1) for tensor in large]
        norms.append(torch.stack([torch.dot(each, each) for each in flat]).sum().sqrt())
    if small:
        norms += torch._foreach_norm(small, 2, dtype=_sum_dtype(small))
    total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    if math.isfinite(total.numpy()):
        return [total]
    return _norms_in_float64(tensors)


def _suits_dot(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.numel() >= _DOT_FROM and tensor.is_contiguous()


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """float32 for 16-bit gradients, whose own precision is too coarse for a sum; None: as it is."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return None
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def multiply_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a scalar tensor, in place."""
    for device, tensors in by_device(gradients).items():
        torch._foreach_mul_(tensors, factor.to(device))
