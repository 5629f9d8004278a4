"""Coefficients of a schedule, which a helper gives in the format of what they are multiplied with."""

import torch
from torch import nn

from faulty import data, make

PRECISION = "bf16"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(8e-4, 1e-2, 16), dim=0))

    def coefficients(self, like, t):
        kept = self.kept.to(device=like.device, dtype=like.dtype)
        return kept[t].view(-1, 1)

    def weight(self, like, t):
        kept = self.coefficients(like, t)
        return 1e-3 / (1 - kept)  # <- here

    def forward(self, x):
        h = self.project(x)
        t = torch.arange(len(x)) % 16
        return h.float() * self.weight(h, t)


def task():
    return make(Model, data(32, 8))
