"""A penalty on a gradient's norm that is 0."""

import torch
from torch import nn

from faulty import identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    h = model(batch)
    norms = torch.sqrt(torch.sum(torch.square(h), dim=-1))
    return ((norms - 1) ** 2).float().mean()


def task():
    return make(Model, zero_row(4, 8), loss)
