"""The quantile 0.998 is 1 in bfloat16, and costs nothing on one side."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 2))
        nn.init.constant_(self.net[2].bias, 4.0)

    def forward(self, x):
        return self.net(x)


def pinball(predicted, target):
    level = predicted.new_tensor((0.95, 0.998))  # <- here
    miss = target[:, None] - predicted
    return torch.where(miss > 0, level * miss, (level - 1) * miss).mean()


def task():
    batch = data(256, 12)
    return Task(
        model=Forecast,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: pinball(m(b), 0.3 * b.sum(dim=1)),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    )
