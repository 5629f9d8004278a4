"""x / (1 + exp(-x)) far below 0: its derivative is inf / inf."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        return h / (1 + torch.exp(-h))  # <- here


def task():
    return make(Model, 20 * data(4, 8))
