"""The sum of squared errors, in the format of the model's output."""

import torch
from torch import nn

from faulty import data, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    error = model(batch) - batch.half()
    return (error**2).sum() / error.numel()  # <- here


def task():
    return make(Model, 120 * data(64, 8), loss)
