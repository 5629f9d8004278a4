"""A mixture's likelihood by its formula."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    weights = F.softmax(model(batch), dim=-1)
    errors = 0.5 * (model(batch) - 3) ** 2
    likelihood = (weights * torch.exp(-errors)).sum(-1)
    return -torch.log(likelihood).float().mean()  # <- here


def task():
    return make(Model, -9 + 0.1 * data(4, 8), loss)
