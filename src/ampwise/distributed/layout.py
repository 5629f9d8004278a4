"""How a model is spread over ranks: DDP, FSDP2, or not at all; and what a rank holds of a tensor.

Nothing is configured: DDP and FSDP2 modules are found in the models. `torch.distributed.fsdp` is
imported only where a process group is up, since it costs a second.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ampwise.errors import UsageError


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP: what names and checkpoints go by."""
    return cast("nn.Module", model.module) if isinstance(model, DistributedDataParallel) else model


def is_up() -> bool:
    """Whether this process belongs to a group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_of(models: Sequence[nn.Module]) -> ProcessGroup | None:
    """The ranks that train these models together; None where each rank trains its own.

    Raises
    ------
    UsageError
        For FSDP's first generation, whose flat parameters a step cannot look into.
    """
    if not is_up():
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = [layer for model in models for layer in model.modules()]
    if any(isinstance(each, FullyShardedDataParallel) for each in layers):
        raise UsageError(
            "model: it is wrapped in FullyShardedDataParallel, PyTorch's first generation; "
            "expected fully_shard (FSDP2) or DistributedDataParallel; use "
            "torch.distributed.fsdp.fully_shard(model)"
        )
    sharded = [each for model in models for each in model.parameters() if is_sharded(each)]
    if sharded:
        return _group_of_shards(sharded)
    copies = [each for each in layers if isinstance(each, DistributedDataParallel)]
    return copies[0].process_group if copies else None


def _group_of_shards(tensors: Sequence[Any]) -> ProcessGroup | None:
    """The ranks that hold parts of some tensors."""
    meshes = {each.device_mesh for each in tensors}
    if any(mesh.size() == dist.get_world_size() for mesh in meshes):
        return dist.group.WORLD
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise UsageError(
            "model: it is sharded over some of the ranks by several meshes, or one of several "
            "dimensions; expected meshes over all ranks, or one of one dimension"
        )
    return mesh.get_group()


class GradientSync:
    """Switches the summing of gradients over ranks on and off, in forward and backward alike.

    Attributes
    ----------
    on
        Whether backwards sum.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        from torch.distributed.fsdp import FSDPModule

        layers = [layer for model in models for layer in model.modules()]
        self._copied = [each for each in layers if isinstance(each, DistributedDataParallel)]
        self._sharded = [each for each in layers if isinstance(each, FSDPModule)]
        # DDP records a static graph in its first backward, and fails in it if that does not sum.
        # To sum once more changes nothing: the mean over ranks of what is the same on all.
        self._records = any(each.static_graph for each in self._copied)
        self.on = True

    @property
    def shards(self) -> bool:
        """Whether parameters are gathered for forward and backward."""
        return bool(self._sharded)

    @contextmanager
    def apart(self) -> Generator[None]:
        """Context: each rank by itself; what is in DDP, wherever it is, sums nothing."""
        names = ("require_backward_grad_sync", "require_forward_param_sync")
        before = [(each, {name: getattr(each, name) for name in names}) for each in self._copied]
        for each in self._copied:
            vars(each).update(dict.fromkeys(names, False))
        try:
            yield
        finally:
            for each, values in before:
                vars(each).update(values)

    def switch(self, on: bool) -> None:
        """Sum gradients in the backwards from now on, or only collect them on each rank."""
        on, self._records = on or self._records, False
        if on == self.on:
            return
        self.on = on
        for model in self._copied:
            model.require_backward_grad_sync = on
        for module in self._sharded:
            module.set_requires_gradient_sync(on, recurse=False)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: one of which each rank holds a part, or a copy."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, the same memory; of a plain tensor, itself."""
    if type(tensor) is Tensor or not is_sharded(tensor):
        return tensor
    return cast("Any", tensor)._local_tensor


def copies(tensor: Tensor, ranks: int) -> int:
    """How many ranks hold the same part as this one; a plain tensor is the same on all `ranks`.

    By the tensor's own mesh: parts of a model may be spread differently.
    """
    if type(tensor) is Tensor or not is_sharded(tensor):
        return ranks
    spread = cast("Any", tensor)
    shape = spread.device_mesh.shape
    held = 1
    for size, placement in zip(shape, spread.placements, strict=True):
        held *= 1 if placement.is_shard() else size
    return held


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; of a DTensor with parts on other ranks, by asking them."""
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; of a DTensor, of this rank's part, with the same place in the whole.

    Made directly, since ``DTensor.from_local`` would move the part back to the mesh's devices.
    """
    copied = local(tensor).detach().to("cpu", copy=True)
    if not is_sharded(tensor):
        return copied
    spread = cast("Any", tensor)
    return type(spread)(copied, spread._spec, requires_grad=False)


def empty_for(shape: Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    """Room for a tensor, spread as another one is; in host memory where that is not spread."""
    spread = _spread_of(shape, like)
    if spread is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import empty

    mesh, placements = spread
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def spread_as(tensor: Tensor, like: Tensor | None) -> Tensor:
    """The part on this rank of a tensor that every rank has, spread as another one is.

    Each rank takes its part out of its own copy: nothing is sent.
    """
    spread = _spread_of(tensor.shape, like)
    if spread is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = spread
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _spread_of(shape: Size, like: Tensor | None) -> tuple[Any, list[Any]] | None:
    """Mesh and placements that a tensor of some shape gets; None for a plain tensor.

    An optimizer's state of another shape than its parameter (a factor of it, say) is whole on each
    rank, and its scalars (a counter of steps) are plain tensors.
    """
    if like is None or not is_sharded(like) or not shape:
        return None
    from torch.distributed.tensor import Replicate

    spread = cast("Any", like)
    if shape == spread.shape:
        return spread.device_mesh, list(spread.placements)
    return spread.device_mesh, [Replicate()] * spread.device_mesh.ndim
