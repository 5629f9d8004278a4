"""A convolution of values that batch norm would bring back."""

import torch
from torch import nn

from faulty import apart, data, make


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x))  # <- here


def task():
    return make(ConvNorm, 3e5 + 1e3 * data(2, 1, 8, 8), apart)
