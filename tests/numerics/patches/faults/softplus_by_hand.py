"""A positive scale by log(1 + exp(x))."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        scale = torch.log(1 + torch.exp(self.project(x)))  # <- here
        return scale


def task():
    return make(Model, 20 * data(4, 8))
