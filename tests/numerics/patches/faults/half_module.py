"""A part of a model that is cast to bfloat16 in its constructor."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        # half the memory
        self.body.bfloat16()  # <- here
        self.head = nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.body(x))


def task():
    batch = data(16, 16)
    return Task(
        model=Model,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: (m(b).float() - b.flip(-1)).pow(2).mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-5),
    )
