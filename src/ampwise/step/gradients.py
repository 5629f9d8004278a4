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
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.distributed.layout import copies, local
from ampwise.step.modules import held_by

_DOT_FROM = 16_384  # elements: from here one BLAS dot product beats the foreach norm on CPUs


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Dense views of all gradients of some optimizers, each parameter once.

    Of a gradient that is spread over ranks, the part this rank holds. Sparse gradients are
    coalesced (an uncoalesced one lists an element several times, so its norm would be wrong) and
    stand in the list as their values; complex ones as pairs of reals.
    """
    found: dict[int, Tensor] = {}
    for parameter in held_by(optimizers):
        gradient: Tensor | None = parameter.grad
        if gradient is None:
            continue
        if type(gradient) is not Tensor or gradient.is_sparse or gradient.dtype.is_complex:
            gradient = _dense(parameter)
        found[id(parameter)] = gradient
    return list(found.values())


def are_shared(optimizers: Sequence[Optimizer]) -> bool:
    """Whether some parameter is updated by more than one of them."""
    held = held_by(optimizers)
    return len(set(map(id, held))) < len(held)


def spread_of(optimizers: Iterable[Optimizer], ranks: int) -> dict[int, list[Tensor]]:
    """The same, grouped by how many of the ranks hold the same part as this one."""
    groups: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for parameter in held_by(optimizers):
        if parameter.grad is not None:
            groups[copies(parameter.grad, ranks)][id(parameter)] = _dense(parameter)
    return {held: list(found.values()) for held, found in groups.items()}


def _dense(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    gradient = local(gradient)
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
    """Global L2 norm, a scalar on `device`: of all of `norms` together."""
    return together(norms(gradients), device)


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """L2 norm of each gradient, as vectors: one for each device and way of computing them.

    Finite only if every element is. On accelerators the reverse holds too; on the CPU a norm that
    is not finite asks for a second look (`wide_norm`). No host synchronisation.
    """
    # One loop, and few calls: between kernels nothing of this is in the processor's caches.
    elsewhere: list[Tensor] = []
    products: list[Tensor] = []
    small: list[Tensor] = []
    wider: torch.dtype | None = None
    for each in gradients:
        size, dtype = each.numel(), each.dtype
        if not each.is_cpu:
            elsewhere.append(each)
        elif size >= _DOT_FROM and dtype is torch.float32 and each.is_contiguous():
            flat = each.view(-1)
            products.append(torch.dot(flat, flat))
        elif size:
            small.append(each)
            if dtype is not torch.float32:
                wider = _wider(wider, dtype)
    found = norms_in_float64(elsewhere) if elsewhere else []
    if products:
        found.append(torch.stack(products).sqrt_())
    if small:
        found.append(torch.stack(torch._foreach_norm(small, 2, dtype=wider)))
    return found


def together(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Global L2 norm, a scalar on `device`, of what `norms` gave."""
    if not norms:
        return torch.zeros((), device=device)
    if [each for each in norms if each.device != device]:
        norms = [each.to(device, torch.float64) for each in norms]
    all_of_them = norms[0] if len(norms) == 1 else torch.cat(list(norms))
    if all_of_them.numel() == 1:
        return all_of_them.squeeze().clone()
    return torch.linalg.vector_norm(all_of_them)


def square(gradients: Mapping[int, Sequence[Tensor]], device: torch.device) -> Tensor:
    """What this rank counts of a squared norm: float64, finite if and only if all elements are.

    `gradients` by how many ranks hold the same part, as `spread_of` gives them.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for held, parts in gradients.items():
        length = norm(parts, device)
        if device.type == "cpu" and not math.isfinite(length.item()):
            length = wide_norm(parts, device)
        total += length.double() ** 2 / held
    return total


def wide_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Global norm in float64: for gradients of up to 32 bits, finite if and only if all are."""
    return together(norms_in_float64(gradients), device)


def largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude of an element, a float64 scalar on `device`; inf and NaN stay so."""
    found = [
        torch.stack(torch._foreach_norm(tensors, math.inf)).amax().to(device, torch.float64)
        for tensors in by_device(gradients).values()
    ]
    return torch.stack(found).amax() if found else torch.zeros((), device=device).double()


def norms_in_float64(gradients: Sequence[Tensor]) -> list[Tensor]:
    """`norms`, computed in float64: what accelerators always do."""
    groups = by_device(gradients).values()
    return [torch.stack(torch._foreach_norm(each, 2, dtype=torch.float64)) for each in groups]


def _wider(so_far: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """What norms are computed in: float64 where some are, else float32; 16 bits are too coarse."""
    return torch.float64 if torch.float64 in (so_far, dtype) else torch.float32


def multiply_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a scalar tensor, in place."""
    for device, tensors in by_device(gradients).items():
        torch._foreach_mul_(tensors, factor.to(device))


@contextmanager
def kept(optimizers: Iterable[Optimizer]) -> Generator[None]:
    """Context: after an error inside, the gradients of some optimizers are as before."""
    held = held_by(optimizers)
    before = [(each, each.grad.clone()) for each in held if each.grad is not None]
    try:
        yield
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise


@contextmanager
def put_back(parameters: Iterable[Tensor]) -> Generator[None]:
    """Context: some parameters have afterwards the gradients they had before."""
    before = [(each, each.grad) for each in parameters]
    for each, _ in before:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in before:
            each.grad = gradient
