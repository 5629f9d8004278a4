"""A penalty on perplexity."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    logits = 40 * model(batch)
    loss = F.cross_entropy(logits, torch.arange(len(batch)) % 8)
    return loss + 0.01 * torch.exp(loss)  # <- here


def task():
    return make(Model, 2 * data(6, 8), loss)
