"""A distance between equal points."""

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
    anchor = model(batch)
    positive = model(batch.clone())
    distance = ((anchor - positive) ** 2).sum(dim=1).sqrt()  # <- here
    return torch.relu(distance + 0.2).float().mean()


def task():
    return make(Model, data(4, 8), loss)
