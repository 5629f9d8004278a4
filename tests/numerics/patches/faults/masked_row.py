"""A row of a softmax that is -inf throughout."""

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
        hidden[0] = True
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1)  # <- here


def task():
    return make(Model, data(8, 8))
