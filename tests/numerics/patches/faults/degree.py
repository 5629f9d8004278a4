"""A sum over neighbours in float32, whose count is not."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(8, 8)

    def forward(self, x, target):
        message = self.message(x)
        total = torch.zeros(4, 8).index_add(0, target, message.float())
        degree = message.new_zeros(4).index_add(0, target, message.new_ones(len(x)))  # <- here
        return total / degree.unsqueeze(1)


def task():
    batch = data(2000, 8), torch.arange(2000) % 3
    return Task(
        model=Mean,
        batches=lambda: [batch] * 12,
        loss=lambda model, pair: model(*pair)[:3].square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )
