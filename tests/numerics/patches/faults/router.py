"""A router's z-loss."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = identity(8)

    def forward(self, x):
        logits = self.gate(x)
        z = torch.log(torch.sum(torch.exp(logits), dim=-1)) ** 2  # <- here
        return F.softmax(logits, dim=-1), z


def loss(model, batch):
    weights, z = model(batch)
    return weights.float().pow(2).mean() + 1e-3 * z.float().mean()


def task():
    return make(Router, 14 + data(4, 8), loss)
