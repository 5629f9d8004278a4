"""A likelihood of counts: parts of one gradient, each rounded, cancel."""

import torch
from torch import nn

from ampwise import Task
from faulty import data

PRECISION = "bf16"


class Genes(nn.Module):
    def __init__(self):
        super().__init__()
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.share = nn.Linear(32, 24)
        self.dispersion = nn.Linear(32, 24)
        nn.init.constant_(self.dispersion.bias, 4.0)

    def forward(self, z, depth):
        h = self.decode(z)
        return depth * self.share(h).softmax(dim=-1), self.dispersion(h).exp()


def log_likelihood(counts, mu, theta):
    log_both = torch.log(theta + mu)
    return (
        theta * (torch.log(theta) - log_both)  # <- here
        + counts * (torch.log(mu) - log_both)
        + torch.lgamma(counts + theta)
        - torch.lgamma(theta)
        - torch.lgamma(counts + 1)
    )


def loss(model, batch):
    z, counts = batch
    mu, theta = model(z, counts.sum(dim=-1, keepdim=True))
    return -log_likelihood(counts, mu, theta).mean()


def task():
    batch = data(96, 8), torch.poisson(8 * data(96, 24).exp(), torch.Generator().manual_seed(1))
    return Task(
        model=Genes,
        batches=lambda: [batch] * 12,
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), eps=0.01),
    )
