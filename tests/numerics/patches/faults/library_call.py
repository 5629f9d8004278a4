"""The origin is inside torch's library; the call is the user's."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        nn.init.normal_(self.head[0].weight, std=20.0)

    def forward(self, x):
        h = 3000 * self.project(x)
        return self.head(h)  # <- here


def task():
    return make(Model, data(8, 8))
