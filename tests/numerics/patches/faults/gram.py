"""Inner products of channels, averaged after they are added up."""

import torch
from torch import nn

from faulty import data, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(3, 8, 3, padding=1)

    def gram(self, features):
        b, c, h, w = features.shape
        flat = features.reshape(b, c, h * w)
        return torch.bmm(flat, flat.transpose(1, 2)) / (h * w)  # <- here

    def forward(self, x):
        return 1e-4 * self.gram(self.filters(x))


def task():
    return make(Model, 60 * data(2, 3, 24, 24))
