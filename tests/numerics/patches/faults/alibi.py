"""A mask of -1e10 kept in a buffer."""

import torch
from torch import nn

from faulty import data, make


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("hidden", torch.ones(6, 6, dtype=torch.bool).triu(1))
        self.masked = -1e10

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        return torch.softmax(scores.masked_fill(self.hidden, self.masked), dim=-1) @ x  # <- here


def task():
    return make(Attention, data(2, 6, 16))
