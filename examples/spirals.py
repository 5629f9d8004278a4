"""A task of one's own: two spirals, told apart by a small network.

ampwise bench examples/spirals.py
ampwise train examples/spirals.py --precision bf16 --set width=256
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import Task


def task(width: int = 128, batch: int = 256) -> Task:
    """What ampwise calls; ``--set width=256`` arrives as a keyword argument."""
    points, labels = spirals(4096, seed=0)
    held_out = spirals(1024, seed=1)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(points.split(batch), labels.split(batch), strict=True)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        right = model(held_out[0].to(device)).argmax(1).cpu() == held_out[1]
        return {"accuracy": right.float().mean().item()}

    return Task(model, batches, loss, evaluate=evaluate, name="spirals")


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (count, 2) on two noisy spirals, and which one each is on."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    radius = torch.rand(count, generator=random).sqrt()
    angle = 3 * math.pi * radius + math.pi * labels
    noise = 0.02 * torch.randn(count, 2, generator=random)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1) + noise, labels
