"""A running sum that leaves the range."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x).abs() + 200
        total = h.cumsum(dim=0)  # <- here
        return total[-1] * 1e-3


def task():
    return make(Model, data(600, 8))
