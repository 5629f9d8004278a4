"""Multi-head attention as it is usually written."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, make


class SelfAttention(nn.Module):
    """Scaled dot-product attention with several heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.scale = self.size ** -0.5

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, self.size)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))

        # attend
        att = (q @ k.transpose(-2, -1)) * self.scale  # <- here
        mask = torch.tril(torch.ones(T, T, device=x.device))
        att = att.masked_fill(mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.out(y)


def task():
    return make(lambda: SelfAttention(64, 4), 300 * data(2, 6, 64))
