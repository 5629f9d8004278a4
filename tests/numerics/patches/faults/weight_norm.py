"""A weight divided by its norm."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, make


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(data(8, 8) * 300)
        self.g = nn.Parameter(torch.ones(8, 1))

    def forward(self, x):
        v = self.v.to(x.dtype)
        norm = v.pow(2).sum(dim=1, keepdim=True).sqrt()  # <- here
        return F.linear(x, self.g * v / norm)


def task():
    return make(WeightNormed, data(4, 8).half())
