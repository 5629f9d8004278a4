"""Slow weights in float32 that follow the fast ones in the format of what was computed."""

import torch
import torch.nn.functional as F
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class SelfTaught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(16, 24)
        self.register_buffer("slow", self.student.weight.detach().clone())

    @torch.no_grad()
    def follow(self, dtype):
        fast = self.student.weight
        self.slow.copy_(torch.lerp(self.slow.to(dtype), fast.to(dtype), 0.004))  # <- here

    def forward(self, x):
        online = self.student(x)
        self.follow(online.dtype)
        return online - F.linear(x.flip(0), self.slow)


def task():
    batch = data(64, 16)
    return Task(
        model=SelfTaught,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: m(b).float().square().mean(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    )
