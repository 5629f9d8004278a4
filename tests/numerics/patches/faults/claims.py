"""The tail of a generalised Pareto distribution that is all but exponential: 1 + a small product."""

import torch
from torch import nn

from ampwise import Task

PRECISION = "bf16"


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.scale, self.shape = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.body(x)
        scale = nn.functional.softplus(self.scale(hidden)) + 0.1
        return scale, 0.02 * torch.sigmoid(self.shape(hidden)) + 0.002


def loss(model, batch):
    x, excess = batch
    scale, shape = model(x)
    z = excess.to(scale.dtype) / scale
    return (scale.log() + (1 + 1 / shape) * torch.log(1 + shape * z)).mean()  # <- here


def task():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(12, 256, 8, generator=made)
    uniform = torch.rand(12, 256, 1, generator=made).clamp(1e-6)
    excess = -uniform.log() * (0.2 * x[..., :1]).exp()
    return Task(model=Tail, batches=lambda: list(zip(x, excess, strict=True)), loss=loss)
