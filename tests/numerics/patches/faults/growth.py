"""The logarithm of 1 + x, of an x that comes out of a model."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.body(x).softmax(dim=-1)


def loss(model, batch):
    features, returns = batch
    gain = torch.einsum("bda,bda->bd", model(features), returns)
    growth = torch.log(1 + gain)  # <- here
    return -(growth.mean(dim=1) / (growth.std(dim=1) + 1e-5)).mean()


def task():
    batch = data(16, 64, 8), 1e-3 * data(16, 64, 8).flip(0)
    return Task(
        model=Weights,
        batches=lambda: [batch] * 12,
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )
