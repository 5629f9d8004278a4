"""LayerNorm by its formula: squares that overflow."""

import torch
from torch import nn

from faulty import apart, data, make


class LayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = ((x - mean) ** 2).mean(-1, keepdim=True)  # <- here
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(16, 16), LayerNorm(16)

    def forward(self, x):
        return self.norm(self.project(x))


def task():
    return make(Model, 1000 * data(4, 16), apart)
