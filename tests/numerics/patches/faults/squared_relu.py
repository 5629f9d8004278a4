"""A squared ReLU whose square is beyond float16, as is its sum in the next product."""

import torch
from torch import nn

from faulty import data, make


class Squared(nn.Module):
    def forward(self, h):
        return torch.relu(h).square()  # <- here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 64), Squared(), nn.Linear(64, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.feed(x).float())

    def feed(self, x):
        return self.down(self.act(self.up(x)))


def task():
    return make(Model, 1000 * data(8, 8))
