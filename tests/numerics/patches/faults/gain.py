"""A gain beyond the range."""

import torch
from torch import nn

from faulty import apart, data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x) * 1e5  # <- here
        return h / h.norm(dim=-1, keepdim=True)


def task():
    return make(Model, data(8, 8), apart)
