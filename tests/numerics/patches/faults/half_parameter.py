"""A weight that is made in bfloat16: torch's own optimizer does not move it."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Scaled(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))  # <- here
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return self.lin(x) * self.gain


def task():
    batch = data(16, 32)
    return Task(
        model=Scaled,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    )
