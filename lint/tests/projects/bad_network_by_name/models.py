import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.project = nn.Linear(options.width, options.width)

    def forward(self, x, mask=None):
        q = self.project(x)
        scores = torch.matmul(q, q.transpose(1, 2))
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)  # expect: AMP212
        return torch.matmul(scores.softmax(-1), q)


class Scaled(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.project = nn.Linear(options.width, options.width)

    def forward(self, x):
        y = self.project(x)
        return y / (y.abs().amax(-1, keepdim=True) + 1e-8)  # expect: AMP211
