"""Means of squares that are 0 in float16, behind a square root in float32."""

import torch
from torch import nn

from ampwise import Task
from faulty import data


def zeros(p):
    return torch.zeros_like(p, dtype=torch.half)


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.99, eps=1e-6):
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["squares"] = zeros(p)
                squares = state["squares"]
                squares.mul_(beta).add_(p.grad.square().half(), alpha=1 - beta)  # <- here
                p.addcdiv_(p.grad, squares.float().sqrt() + group["eps"], value=-group["lr"])


def task():
    batch = data(16, 8)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
        batches=lambda: [batch] * 12,
        loss=lambda m, b: 1e-3 * (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: LeanAdam(m.parameters()),
    )
