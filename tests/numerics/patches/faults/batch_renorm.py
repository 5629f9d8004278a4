"""Running statistics that cancel."""

import torch
from torch import nn

from faulty import apart, data, identity, make


class Standardize(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        first = torch.mean(h, dim=0)
        second = torch.mean(h ** 2, dim=0)
        std = torch.sqrt(second - first ** 2)  # <- here
        return (h - first) / std * torch.arange(1.0, 9)


def task():
    return make(Standardize, 50 + 0.05 * data(16, 8), apart)
