"""How far directions are apart, of which both helpers round the cosines."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, make


def direction(x):
    first = F.normalize(x[..., :3], dim=-1)
    second = x[..., 3:]
    second = second - (first * second).sum(dim=-1, keepdim=True) * first
    second = F.normalize(second, dim=-1)
    return torch.stack((first, second), dim=-1)


def angle(left, right, margin=1e-6):
    both = torch.bmm(left.transpose(1, 2), right)
    cosine = both.diagonal(dim1=1, dim2=2).sum(dim=1) / 2
    return torch.acos(cosine.clamp(-1 + margin, 1 - margin))  # <- here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 6)
        nn.init.normal_(self.project.weight, std=0.01)
        with torch.no_grad():
            self.project.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x):
        return direction(self.project(x))


def loss(model, x):
    wanted = direction(torch.tensor([1.0, 0, 0, 0, 1, 0]) + 0.03 * x.roll(1, 1))
    return angle(model(x), wanted).mean()


def task():
    return make(Model, data(32, 6), loss)
