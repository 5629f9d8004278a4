"""A variance predicted as its logarithm, far too large."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        log_variance = self.project(x)
        return torch.exp(log_variance) * 1e-6  # <- here


def task():
    return make(Model, 14 + data(4, 8))
