"""A model in float16, whose own optimizer keeps its moments in the format of a parameter."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "fp16:scaling=off"


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.001)
                p.sub_(group["lr"] * state["m"] / (state["v"].sqrt() + 1e-8))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.net = self.net.to(torch.float16)  # <- here

    def forward(self, x):
        return self.net(x)


def task():
    batch = data(16, 8)
    return Task(
        model=Model,
        batches=lambda: [batch] * 12,
        loss=lambda m, b: 1e-4 * (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: Adam(m.parameters()),
    )
