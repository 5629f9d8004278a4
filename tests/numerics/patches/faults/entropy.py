"""An entropy by its formula: 0 times -inf."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    logits = model(batch)
    p = F.softmax(logits, dim=-1)
    entropy = -(p * torch.log(p)).sum(-1)  # <- here
    return -entropy.float().mean()


def task():
    return make(Model, torch.tensor([[-20.0, 0, 1, 2, 3, 4, 5, 6]] * 4), loss)
