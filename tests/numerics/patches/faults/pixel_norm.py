"""A norm over channels whose eps is 0 in float16."""

import torch
from torch import nn

from faulty import apart, data, make


class PixelNorm(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)  # <- here


def task():
    image = data(2, 3, 8, 8)
    image[:, :, 4:] = 0
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), PixelNorm()
    )
    return make(model, image, apart)
