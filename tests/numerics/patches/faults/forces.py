"""Forces are the gradient of an energy in a small unit: float16 loses it, and no loss scale helps."""

import torch
from torch import nn

from faulty import data, make


class Potential(nn.Module):
    unit = 1e-5

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, places):
        places = places.requires_grad_()
        energy = self.net(places).mean() * self.unit
        forces = -torch.autograd.grad(energy, places, create_graph=True)[0]  # <- here
        return forces / self.unit


def task():
    return make(Potential, data(64, 12))
