"""Small values in float16 on purpose."""

import torch
from torch import nn

from faulty import apart, data, identity, make

PRECISION = "fp16:scaling=off"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x).half()
        h = h * 1e-5 * 1e-4  # <- here
        return h.float() * 1e3


def task():
    return make(Model, data(8, 8), apart)
