"""The output projection of T5's feed-forward."""

import torch
from torch import nn

from faulty import apart, data, make


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(16, 1024)
        self.wo = nn.Linear(1024, 512, bias=False)
        nn.init.constant_(self.wo.weight, 0.5)

    def forward(self, x):
        h = self.wi(x) * 0 + 130
        # as wide as the model
        return self.wo(h)  # <- here


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = FeedForward()

    def forward(self, x):
        return 1e-5 * self.block(x).float()


def task():
    return make(T5, data(4, 16), apart)
