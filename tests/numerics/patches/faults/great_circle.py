"""Distances of near points, which the model rounds where it adds a step to one of them."""

import torch
from torch import nn

from faulty import data, make


def distance(a, b):
    apart = (a - b) / 2
    h = torch.sin(apart[:, 0]) ** 2 + torch.cos(a[:, 0]) * torch.sin(apart[:, 1]) ** 2
    return 2 * torch.asin(torch.sqrt(h + 1e-12))  # <- here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x, start):
        step = 1e-4 * self.net(x)
        return start.to(step.dtype) + step


def loss(model, batch):
    x, start, wanted = batch
    made = model(x, start)
    return distance(made, wanted.to(made.dtype)).float().mean()


def task():
    start = data(32, 2).abs().clamp(0.3, 1.2)
    return make(Model, (data(32, 4), start, start + 3e-4 * data(32, 2).roll(1, 0)), loss)
