"""Parameters of which several ranks have the same, and an exact checksum of them.

The checksum is the sum, modulo 2**64, of memory read as 64-bit integers: the same whatever the
order of summing, and as fast as reading the memory once. Every bit counts, NaN payloads and the
sign of zero included.

Compared are the parameters of DDP modules; with FSDP2 (or any DTensor) plain parameters, and of
DTensors those with copies, such as the replicas of HSDP, where a key says which part a rank holds.
Parameters that are sharded only exist once, so there is nothing to compare. Buffers are DDP's own
business, which broadcasts them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampwise.distributed.layout import copies, is_sharded, local

_WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Compared:
    """The parameters of which several ranks have the same, and their checksums.

    Parameters
    ----------
    models
        As they are trained, wrapped in DDP or sharded.
    device
        Where they are.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        self._models = models
        self._none = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def key(self) -> int:
        """The same on ranks that hold the same parts of DTensors."""
        places = sorted({_place(each) for each in self._held()[1]})
        return zlib.crc32(repr(places).encode())

    def checksums(self) -> Tensor:
        """Of what all ranks have, and of the parts that some have: two int64 on the device."""
        return torch.stack([self._sum(each) for each in self._held()])

    def _held(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """What all ranks have, and the parts that some have."""
        everywhere: list[nn.Parameter] = []
        parts: list[nn.Parameter] = []
        for model in self._models:
            held = list(model.parameters())
            if any(is_sharded(each) for each in held):
                everywhere += [each for each in held if not is_sharded(each)]
                parts += [each for each in held if is_sharded(each) and copies(each, 1) > 1]
            else:
                everywhere += _copied_by_ddp(model)
        return everywhere, parts

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([self._none, *(checksum(local(each)) for each in tensors)]).sum()


def checksum(tensor: Tensor) -> Tensor:
    """Sum modulo 2**64 of a tensor's memory as integers, an int64 scalar on its device.

    Of 64-bit words, and of what is left at the end, element by element.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    elements = tensor.contiguous().view(-1)
    if elements.storage_offset() * size % _WORD_BYTES:  # words must start where memory's do
        elements = elements.clone()
    whole = elements.numel() - elements.numel() % (_WORD_BYTES // size)
    total = elements[:whole].view(torch.int64).sum()
    if whole < elements.numel():
        total += elements[whole:].view(_INTEGERS[size]).sum(dtype=torch.int64)
    return total


def _copied_by_ddp(model: nn.Module) -> list[nn.Parameter]:
    """Those that DDP keeps the same; a model outside of DDP is its process's own business."""
    layers = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    return [
        parameter
        for layer in layers
        for name, parameter in cast("nn.Module", layer.module).named_parameters()
        if name not in cast("Any", layer).parameters_to_ignore
    ]


def _place(parameter: nn.Parameter) -> str:
    """Which part of a DTensor this rank has: its ranks, and where it stands among the parts."""
    spread = cast("Any", parameter)
    mesh = spread.device_mesh
    coordinate = [
        (dim, at)
        for dim, (placement, at) in enumerate(
            zip(spread.placements, mesh.get_coordinate() or (), strict=False)
        )
        if placement.is_shard()
    ]
    return f"{mesh.mesh.tolist()} {spread.placements} {coordinate}"
