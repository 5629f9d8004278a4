"""Weights in bfloat16: the loss falls a little, and then stays."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import Task


def task() -> Task:
    """A network whose weights are bfloat16 themselves."""

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        return layers.bfloat16()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        for _ in range(8):
            x = torch.randn(64, 64, generator=random)
            yield x.bfloat16(), x[:, :4].argmax(-1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-5)

    return Task(model, batches, loss, optimizer, name="bf16-weights")
