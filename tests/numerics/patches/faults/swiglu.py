"""A gate that overflows in the product."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = identity(8), identity(8)
        self.down = nn.Linear(8, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))  # <- here


def task():
    return make(SwiGLU, 300 * data(4, 8), lambda m, b: 1e-6 * m(b).float().pow(2).mean())
