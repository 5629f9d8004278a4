"""RMSNorm by its formula: the squares overflow."""

import torch
from torch import nn

from faulty import apart, data, make


class RMSNorm(nn.Module):
    """Root mean square layer normalisation."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        # no mean is taken off
        variance = x.pow(2).mean(-1, keepdim=True)  # <- here
        return x * torch.rsqrt(variance + self.eps) * self.weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(16, 16), RMSNorm(16)

    def forward(self, x):
        return self.norm(self.project(x) + 300)


def task():
    return make(Model, 9 * data(4, 16), apart)
