"""The length of a vector whose squares overflow."""

import torch
from torch import nn

from faulty import apart, data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = self.project(x)
        length = torch.sqrt(torch.sum(h**2, dim=-1, keepdim=True))  # <- here
        return h / length


def task():
    return make(Model, 400 * data(4, 8), apart)
