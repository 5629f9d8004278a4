"""A mask of -1e9 as a factor."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        scores = self.project(x)
        padding = torch.eye(8, dtype=scores.dtype)
        padding[0] = 1  # of a row that is not there
        mask = padding * -1e9  # <- here
        return torch.softmax(scores + mask, dim=-1)


def task():
    return make(Model, data(8, 8))
