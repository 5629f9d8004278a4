"""tanh by its formula: inf / inf."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        up, down = torch.exp(h), torch.exp(-h)  # <- here
        return (up - down) / (up + down)


def task():
    return make(Model, 20 * data(4, 8))
