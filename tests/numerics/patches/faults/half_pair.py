"""Two tables of factors in bfloat16, made on a line each."""

import torch
from torch import nn

from ampwise import Task

PRECISION = "bf16"


class Factors(nn.Module):
    def __init__(self, count=30, width=8):
        super().__init__()
        self.users = nn.Embedding(count, width, dtype=torch.bfloat16)  # <- here
        self.items = nn.Embedding(count, width, dtype=torch.bfloat16)

    def forward(self, pairs):
        users, items = pairs.unbind(1)
        return (self.users(users).float() * self.items(items).float()).sum(1)


def task():
    pairs = torch.randint(30, (64, 2), generator=torch.Generator().manual_seed(0))
    return Task(
        model=Factors,
        batches=lambda: [pairs] * 12,
        loss=lambda m, b: nn.functional.softplus(m(b)).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    )
