"""A whole model in float16, and an Adam whose eps is 0 in it."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "fp16:scaling=off"


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def task():
    batch = data(16, 8)
    return Task(
        model=lambda: network().half(),  # <- here
        batches=lambda: [batch] * 12,
        loss=lambda m, b: 1e-4 * (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    )
