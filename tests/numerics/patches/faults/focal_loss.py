"""A focal loss on probabilities."""

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
    target = torch.ones_like(batch)
    prob = torch.sigmoid(model(batch))
    pt = prob * target + (1 - prob) * (1 - target)
    focal = -((1 - pt) ** 2) * torch.log(pt)  # <- here
    return focal.mean()


def task():
    return make(Model, torch.cat([-18 + data(2, 8), 4 * data(2, 8)]) , loss)
