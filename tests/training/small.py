"""A tiny task with everything a resume can get wrong: shuffling, dropout, BatchNorm, overflows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampwise import Task
from ampwise.policy import Policy, Resolution
from ampwise.training.config import TrainConfig


class Silent:
    """A progress that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def step(self, record, samples_per_s, planned) -> None:
        pass

    def evaluated(self, step, metrics) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)

    warning = message


def task(bad: tuple[int, ...] = ()) -> Task:
    """Shuffled classification; samples whose index is in `bad` overflow."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=generator)
    y = torch.randint(0, 4, (40,), generator=generator)
    held_out = x[:8].clone()
    x[list(bad)] = 1e30
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)
        )

    return Task(
        name="small",
        model=model,
        batches=lambda: loader,
        loss=lambda m, pair: F.cross_entropy(m(pair[0]), pair[1]),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
        evaluate=lambda m: {"accuracy": (m(held_out).argmax(-1) == y[:8]).float().mean().item()},
    )


def config(out: Path | None, precision: str = "fp32", **settings) -> TrainConfig:
    resolution = Resolution(precision, Policy.parse(precision), "cpu", (), changed=False)
    return TrainConfig(resolution, out=out, **settings)
