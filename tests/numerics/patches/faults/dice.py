"""A dice loss whose guard is lost."""

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
    prob = torch.sigmoid(model(batch) - 40)
    target = torch.zeros_like(prob)
    overlap = (prob * target).sum(dim=1)
    total = prob.sum(dim=1) + target.sum(dim=1)
    score = 2 * overlap / (total + 1e-8)  # <- here
    return (1 - score).float().mean()


def task():
    return make(Model, data(4, 8), loss)
