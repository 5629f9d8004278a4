"""A helper function with a temperature."""

import torch
from torch import nn

from faulty import apart, data, identity, make


def soft(scores, temperature=0.02):
    """Weights of scores."""
    e = torch.exp(scores / temperature)  # <- here
    return e / torch.sum(e, -1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return soft(self.project(x))


def task():
    return make(Model, data(4, 8), apart)
