"""Codes that are cast to bfloat16 when they are made, and written into a tensor in 16 bits."""

import torch
from torch import nn

from ampwise import Task

PRECISION = "bf16"


class Filled(nn.Module):
    def __init__(self, count=20, width=16):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(count, width).to(torch.bfloat16))  # <- here
        self.out = nn.Linear(width, 4)

    def forward(self, index):
        room = torch.zeros(len(index), 2, self.out.in_features, dtype=torch.bfloat16)
        room[torch.arange(len(index)), index % 2] = self.codes[index]
        return self.out(room).sum(1)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch).float(), batch % 4)


def task():
    index = torch.arange(19)
    return Task(
        model=Filled,
        batches=lambda: [index] * 12,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    )
