"""A small model, its data and its ways to be spread, for tests that run on several ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Spread = Literal["alone", "ddp", "fsdp"]

FEATURES, CLASSES = 8, 3


def network(spread: Spread = "alone", seed: int = 0) -> nn.Module:
    """Two layers; the last bias has 3 elements, so that two ranks hold 2 and 1 of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    return spread_out(model, spread)


def spread_out(model: nn.Module, spread: Spread) -> nn.Module:
    if spread == "ddp":
        return DistributedDataParallel(model)
    if spread == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model


def batches(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, FEATURES, generator=source),
            torch.randint(0, CLASSES, (size,), generator=source),
        )
        for _ in range(count)
    ]


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([whole(each).detach().flatten() for each in model.parameters()])


def me() -> int:
    return dist.get_rank()
