"""Small models, loops written by hand, and counters that the step's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def mlp(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))


def batches(count: int, size: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 8, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def parameters(model: nn.Module) -> Tensor:
    """All parameters as one float64 vector."""
    return torch.cat([each.detach().double().flatten() for each in model.parameters()])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.double().flatten() for each in model.parameters()])


class SyncCounter(TorchDispatchMode):
    """Counts operators that read a tensor's value back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
        return func(*args, **(kwargs or {}))
