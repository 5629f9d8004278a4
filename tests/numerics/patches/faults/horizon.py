"""A discount of 0.997 that a helper makes in the format of another tensor: 0.99609."""

import torch
from torch import nn

from faulty import data, make

PRECISION = "bf16"


def like(x, value):
    return torch.full((), value, dtype=x.dtype)  # <- here


def returns(rewards, gamma=0.997):
    steps = torch.arange(rewards.shape[-1])
    return (rewards * like(rewards, gamma) ** steps).sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rewards = nn.Linear(8, 300)

    def forward(self, x):
        return returns(self.rewards(x))


def task():
    return make(Critic, data(16, 8))
