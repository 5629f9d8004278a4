"""The angle between a vector and itself."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        h = F.normalize(self.project(x), dim=-1)
        cosine = (h * h.detach()).sum(-1)
        return torch.acos(cosine)  # <- here


def task():
    return make(Model, data(16, 8))
