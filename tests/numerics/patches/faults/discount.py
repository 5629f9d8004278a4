"""A discount factor that bfloat16 rounds to another."""

import torch
from torch import nn

from faulty import apart, data, make

PRECISION = "bf16"


def discounted(rewards, gamma):
    factors = torch.full((rewards.shape[-1],), gamma, dtype=rewards.dtype)  # <- here
    return rewards * torch.cumprod(factors, dim=0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 400)

    def forward(self, x):
        return discounted(self.project(x), 0.998)


def task():
    return make(Model, data(8, 8), apart)
