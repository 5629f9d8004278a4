"""A running covariance in float32, whose update autocast computes in bfloat16."""

import torch
from torch import nn

from faulty import data, make

PRECISION = "bf16"


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 12)
        self.register_buffer("cov", torch.eye(12))

    def forward(self, x):
        z = self.embed(x)
        with torch.no_grad():
            share = 0.001 / len(z)
            self.cov.copy_(torch.addmm(self.cov, z.t(), z, beta=0.999, alpha=share))  # <- here
        return z * self.cov.diagonal().clamp(min=1e-3).rsqrt()


def task():
    return make(Whitened, data(64, 16))
