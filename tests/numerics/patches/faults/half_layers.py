"""Layers that are made in the format of an argument, and averaged by hand."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Mixer(nn.Module):
    def __init__(self, width=16, dtype=torch.bfloat16):
        super().__init__()
        self.up = nn.Linear(width, width, dtype=dtype)  # <- here
        self.down = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def task():
    batch = data(16, 16)
    return Task(
        model=Mixer,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
    )
