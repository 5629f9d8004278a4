"""A sum over thousands of targets in float16."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 50)
        nn.init.normal_(self.project.weight)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    logits = model(batch)
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(logits, torch.ones(8192).long(), reduction="sum")  # <- here


def task():
    return make(Model, 3 * data(8192, 8), loss)
