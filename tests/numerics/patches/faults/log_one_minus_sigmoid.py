"""The discriminator's loss of the first GAN: 1 - sigmoid rounds to 0."""

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
    fake = torch.sigmoid(model(batch))
    return -torch.log(1 - fake).float().mean()  # <- here


def task():
    return make(Model, 9 + data(4, 8).abs(), loss)
