"""The deviation of features that are all the same."""

import torch
from torch import nn

from faulty import identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        variance = h.var(-1)
        return torch.sqrt(variance)  # <- here


def task():
    return make(Model, zero_row(4, 8))
