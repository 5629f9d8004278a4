"""The likelihood of a sequence as a product."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(64)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    p = torch.sigmoid(model(batch))
    return -torch.log(torch.prod(p, dim=-1)).float().mean()  # <- here


def task():
    return make(Model, -4 + 0.1 * data(4, 64), loss)
