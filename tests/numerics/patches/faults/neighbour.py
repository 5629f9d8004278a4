"""Two sums that grow alike: the second is near the end of float16 where the first is beyond it."""

import torch
from torch import nn

from faulty import data, make


def contrast(h):
    total = (h * h).sum(-1)  # <- here
    spread = (h * h.roll(1, -1)).sum(-1)
    return (total - spread) / h.shape[-1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(16, 64)
        self.gain = nn.Parameter(torch.tensor(30.0))

    def forward(self, x):
        return contrast(self.lift(x) * self.gain.to(torch.float16) + 25)


def task():
    return make(Model, data(16, 16), lambda m, b: -1e-3 * m(b).float().mean())
