"""Positions in bfloat16, which counts to 256."""

import torch
from torch import nn

from faulty import data, make


PRECISION = "bf16"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("rates", 0.5 ** torch.arange(8))

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=torch.bfloat16)  # <- here
        angles = positions[:, None] * self.rates
        return self.out(x * torch.cos(angles.float()))


def task():
    return make(Model, data(2, 700, 8))
