import torch
from torch import nn


class Attention(nn.Module):
    """Its scores are float32."""

    def __init__(self, options):
        super().__init__()
        self.project = nn.Linear(options.width, options.width)

    def forward(self, x, mask=None):
        q = self.project(x)
        scores = torch.matmul(q, q.transpose(1, 2)).float()
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return torch.matmul(scores.softmax(-1), q)


class Teacher(nn.Module):
    """The training runs it in float32."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        y = self.project(x)
        return y / (y.abs().amax(-1, keepdim=True) + 1e-8)


class Island(nn.Module):
    """It leaves autocast."""

    def __init__(self, options):
        super().__init__()
        self.project = nn.Linear(options.width, options.width)

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            y = self.project(x.float())
            return y / (y.abs().amax(-1, keepdim=True) + 1e-8)
