"""A cosine similarity by its formula, of large vectors."""

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
    a, b = model(batch).chunk(2, dim=1)
    dot = (a * b).sum(dim=1)
    norms = a.pow(2).sum(dim=1).sqrt() * b.pow(2).sum(dim=1).sqrt()  # <- here
    return (1 - dot / norms).float().mean()


def task():
    return make(Model, 250 * data(4, 8), loss)
