"""The root of a magnitude that is 0."""

import torch
from torch import nn

from faulty import identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return torch.sqrt(self.project(x).abs())  # <- here


def task():
    return make(Model, zero_row(4, 8))
