"""How often each index comes, in the format of what is divided by it."""

import torch
from torch import nn

from faulty import data, make

PRECISION = "bf16"


def counted(target, size, like):
    ones = torch.ones(len(target), dtype=like.dtype, device=like.device)
    return torch.zeros(size, dtype=like.dtype, device=like.device).index_add_(0, target, ones)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        h = self.project(x)
        target = torch.arange(len(x)) % 2
        summed = torch.zeros(2, 8).index_add(0, target, h.float())
        return summed / counted(target, 2, like=h)[:, None]  # <- here


def task():
    return make(Model, data(2048, 8) + 1)
