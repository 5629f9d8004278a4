"""A penalty on large activations."""

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
    h = model(batch)
    penalty = torch.sum(h ** 2)  # <- here
    return 1e-4 * penalty.float() + h.float().mean()


def task():
    return make(Model, 40 * data(64, 8), loss)
