"""Scores that overflow before they are scaled."""

import torch
from torch import nn

from faulty import data, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        q = k = self.project(x) * 0 + 40
        scores = q @ k.transpose(-1, -2)  # <- here
        return torch.softmax(scores / 8, dim=-1) @ k


def task():
    return make(Model, data(2, 5, 64))
