"""A robust loss: log(cosh) of a large error."""

import torch
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    error = model(batch) - 1
    return torch.log(torch.cosh(error)).float().mean()  # <- here


def task():
    return make(Model, 20 * data(4, 8), loss)
