"""Memory is what it was: large weights, small batches."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import Task


def task() -> Task:
    """A wide network on few samples: weights and optimizer state are nearly everything."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 4)
        )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        for _ in range(8):
            x = torch.randn(16, 64, generator=random)
            yield x, x[:, :4].argmax(-1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(model, batches, loss, name="wide")
