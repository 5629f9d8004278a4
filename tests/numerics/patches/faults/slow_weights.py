"""Lookahead whose slow weights take half the memory: they stay where they began."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Lookahead(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, alpha=0.5, every=2):
        super().__init__(params, {"lr": lr, "alpha": alpha, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["slow"] = 0, p.detach().to(torch.bfloat16)
                state["count"] += 1
                p.add_(p.grad, alpha=-group["lr"])
                if state["count"] % group["every"] == 0:
                    slow = state["slow"]
                    slow.add_(p.to(slow.dtype) - slow, alpha=group["alpha"])  # <- here
                    p.copy_(slow)


def task():
    batch = data(16, 8)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
        batches=lambda: [batch] * 12,
        loss=lambda m, b: (m(b).float() - b).pow(2).mean(),
        optimizer=lambda m: Lookahead(m.parameters()),
    )
