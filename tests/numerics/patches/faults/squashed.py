"""A squashed Gaussian policy, whose correction is weak long before it is infinite."""

import torch
from torch import nn

from ampwise import Task
from faulty import data


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.mean = nn.Linear(64, 6)
        self.log_std = nn.Linear(64, 6)

    def forward(self, x, noise):
        hidden = self.body(x)
        raw = 12 * self.mean(hidden) + self.log_std(hidden).exp() * noise
        squashed = torch.tanh(raw)
        density = -self.log_std(hidden) - torch.log(1 - squashed.pow(2) + 1e-6)  # <- here
        return squashed, density.sum(dim=-1)


def loss(model, batch):
    squashed, density = model(*batch)
    return 0.1 * density.mean() - squashed.mean()


def task():
    batch = 2 * data(256, 16), data(256, 6)
    return Task(
        model=Actor,
        batches=lambda: [batch] * 12,
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    )
