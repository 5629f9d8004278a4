"""Attention that decays: its growing half is cast to the 16 bits of the keys."""

import torch
from torch import nn

from ampwise import Task
from faulty import data


class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        place = torch.arange(x.shape[1], device=x.device)
        fade = (0.9**place).to(q.dtype).unsqueeze(-1)
        grow = (0.9**-place).to(k.dtype).unsqueeze(-1)  # <- here
        scores = (q * fade) @ (k * grow).transpose(-1, -2)
        mixed = scores.tril() @ v
        return self.out(mixed)


def task():
    batch = data(2, 160, 16)
    return Task(
        model=Retention,
        batches=lambda: [batch] * 12,
        loss=lambda model, x: model(x).float().square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )
