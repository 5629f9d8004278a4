"""A mask of -1e9 by where."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        scores = self.project(x)
        hidden = torch.eye(8, dtype=torch.bool)
        scores = torch.where(hidden, torch.full_like(scores, -1e9), scores)  # <- here
        return torch.softmax(scores, dim=-1)


def task():
    return make(Model, data(8, 8))
