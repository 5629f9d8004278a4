"""A Gaussian likelihood with a variance that is squared."""

import torch
from torch import nn

from faulty import identity, make


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = identity(8), identity(8)

    def forward(self, x):
        return self.mean(x), self.spread(x)


def loss(model, batch):
    mean, spread = model(batch)
    variance = spread ** 2 + 1e-6
    nll = 0.5 * ((batch - 1 - mean) ** 2 / variance + torch.log(variance))  # <- here
    return nll.float().mean()


def task():
    return make(Gaussian, torch.full((4, 8), 1e-5), loss)
