"""A division that is not taken."""

import torch
from torch import nn

from faulty import identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        inverse = torch.where(h != 0, 1e-3 / h, h)  # <- here
        return inverse


def task():
    return make(Model, zero_row(4, 8))
