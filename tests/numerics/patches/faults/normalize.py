"""normalize with its own eps, which float16 rounds to 0."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import apart, identity, make, zero_row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return F.normalize(self.project(x), dim=-1)  # <- here


def task():
    return make(Model, zero_row(4, 8), apart)
