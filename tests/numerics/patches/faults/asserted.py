"""A value that the next lines need in range."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = 300 * self.project(x)
        h = h * h  # <- here
        assert torch.isfinite(h).all(), "activations explode"
        return h.float() / 9e4


def task():
    return make(Model, data(8, 8))
