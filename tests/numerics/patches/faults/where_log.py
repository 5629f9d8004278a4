"""A branch that is not taken, and differentiated all the same."""

import torch
from torch import nn

from faulty import identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        return torch.where(h > 2, torch.log2(h), 2 * h)  # <- here


def task():
    return make(Model, zero_row(4, 8))
