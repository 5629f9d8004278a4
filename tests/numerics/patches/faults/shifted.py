"""Digits that an offset shifts out."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = 0.1 * self.project(x).half()
        return (h + 2000) - 2000  # <- here


def task():
    return make(Model, data(8, 8))
