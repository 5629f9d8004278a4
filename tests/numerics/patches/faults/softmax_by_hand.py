"""Softmax without taking the maximum out."""

import torch
from torch import nn

from faulty import apart, data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        weights = h.exp()  # <- here
        return weights / weights.sum(-1, keepdim=True)


def task():
    return make(Model, 20 + data(4, 8), apart)
