"""What the faulty tasks beside this file share: a batch that repeats, a loss, an optimizer."""

from __future__ import annotations

import torch
from torch import nn

from ampwise import Task


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def zero_row(*shape: int) -> torch.Tensor:
    batch = data(*shape)
    batch[1] = 0
    return batch


def identity(width: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(width, width, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        if bias:
            layer.bias.zero_()
    return layer


def square(model, batch):
    return model(batch).float().pow(2).mean()


def apart(model, batch):
    return (model(batch).float() - 0.5).pow(2).mean()


def make(model, batch, loss=square) -> Task:
    return Task(
        model=model,
        batches=lambda: [batch] * 12,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-5),
    )
