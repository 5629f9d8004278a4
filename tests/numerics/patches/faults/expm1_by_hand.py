"""exp(x) - 1 of small arguments."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        growth = torch.exp(h) - 1  # <- here
        return growth * 1e4


def task():
    return make(Model, 2e-4 * data(8, 8))
