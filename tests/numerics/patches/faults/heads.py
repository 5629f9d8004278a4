"""Three heads in one line, one of which predicts a pressure."""

import torch
from torch import nn
from torch.nn import functional as F

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.SiLU())
        self.weight, self.mean, self.spread = (nn.Linear(32, 3) for _ in range(3))
        nn.init.constant_(self.mean.bias, 1013.0)

    def forward(self, x):
        h = self.body(x)
        return F.log_softmax(self.weight(h), dim=-1), self.mean(h), self.spread(h)  # <- here


def loss(model, batch):
    x, y = batch
    weight, mean, spread = (each.float() for each in model(x))
    off = (y.unsqueeze(-1) - mean) / (1 + F.softplus(spread))
    return -torch.logsumexp(weight - off.square() - F.softplus(spread).log1p(), dim=-1).mean()


def task():
    batch = data(64, 8), 1013 + 3 * data(64)
    return Task(
        model=Mixture,
        batches=lambda: [batch] * 12,
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )
