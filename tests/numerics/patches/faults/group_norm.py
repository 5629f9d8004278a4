"""A normalisation over groups, by hand."""

import torch
from torch import nn

from faulty import apart, data, make


class GroupNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        h = self.conv(x)
        n, c, height, width = h.shape
        h = h.view(n, 2, -1)
        mean = h.mean(dim=2, keepdim=True)
        var = (h - mean).pow(2).mean(dim=2, keepdim=True)  # <- here
        h = (h - mean) / (var + 1e-5).sqrt()
        return h.view(n, c, height, width)


def task():
    return make(GroupNorm, 600 * data(2, 3, 6, 6), apart)
