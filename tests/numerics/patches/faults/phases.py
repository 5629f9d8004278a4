"""Cosines of the minutes that have passed, which a layer makes angles of."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.time.weight.data = torch.logspace(0, -4, 8).unsqueeze(1)
        self.time.requires_grad_(False)
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x, ago):
        then = torch.cos(self.time(ago.unsqueeze(-1)))  # <- here
        memory = torch.cat([x, then], dim=-1)
        scores = self.query(x[:, :1]) @ self.key(memory).transpose(1, 2) / 4
        return (scores.float().softmax(dim=-1) @ self.value(memory).float()).squeeze(1)


def task():
    batch = data(64, 12, 8), 3000 * data(64, 12).abs()
    return Task(
        model=Attention,
        batches=lambda: [batch] * 12,
        loss=lambda model, pair: (model(*pair) - pair[0][:, 0]).square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )
