"""Rotary angles with positions cast to bfloat16."""

import torch
from torch import nn

from faulty import data, make


PRECISION = "bf16"


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def angles(self, length, dtype):
        t = torch.arange(length).to(torch.bfloat16)  # <- here
        frequencies = 1.0 / (100 ** (torch.arange(0, 8) / 8))
        return torch.outer(t.float(), frequencies)

    def forward(self, x):
        h = self.project(x)
        return h * self.angles(x.shape[1], h.dtype).cos()


def task():
    return make(Rotary, data(2, 900, 8))
