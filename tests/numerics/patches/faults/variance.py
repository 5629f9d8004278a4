"""Mean of squares less the square of the mean: all digits cancel."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(16)

    def forward(self, x):
        h = self.project(x) + 20.0
        mean = h.mean(-1, keepdim=True)
        variance = (h * h).mean(-1, keepdim=True) - mean * mean  # <- here
        return ((h - mean) / torch.sqrt(variance))[:, :4]


def task():
    return make(Model, 0.11 * data(64, 16).abs())
