"""A table in bfloat16, to save memory: steps of a row-wise optimizer are lost in it."""

import torch
from torch import nn

from ampwise import Task

PRECISION = "bf16"


class RowWise(torch.optim.Optimizer):
    """Adagrad with one sum for each row."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad.float(), self.state[p]
                square = grad.square().mean(-1, keepdim=True)
                state["sum"] = state.get("sum", torch.zeros_like(square)) + square
                p.sub_(group["lr"] * grad / (state["sum"].sqrt() + 1e-8))


class Tagger(nn.Module):
    def __init__(self, words=40, width=16):
        super().__init__()
        self.table = nn.Embedding(  # <- here
            words,
            width,
            dtype=torch.bfloat16,
        )
        self.out = nn.Linear(width, 5)

    def forward(self, words):
        return self.out(self.table(words))


def loss(model, batch):
    words, tags = batch
    return nn.functional.cross_entropy(model(words).float(), tags)


def task():
    random = torch.Generator().manual_seed(0)
    words = torch.randint(40, (64,), generator=random)
    return Task(
        model=Tagger,
        batches=lambda: [(words, words % 5)] * 12,
        loss=loss,
        optimizer=lambda m: RowWise(m.parameters()),
    )
