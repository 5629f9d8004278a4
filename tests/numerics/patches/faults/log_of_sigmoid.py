"""A ranking loss: log(sigmoid) of a margin that is far below 0."""

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
    margin = model(batch)[:, 0]
    return -torch.log(torch.sigmoid(margin)).float().mean()  # <- here


def task():
    return make(Model, -18 - data(4, 8).abs(), loss)
