"""Binary cross-entropy by its formula."""

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
    target = (batch > 0).to(batch.dtype)
    p = torch.sigmoid(3 * model(batch))
    return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()  # <- here


def task():
    return make(Model, 6 * data(8, 8), loss)
