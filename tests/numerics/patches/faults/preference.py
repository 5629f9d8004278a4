"""Probabilities of whole answers, of which the difference is what is learned."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, make

PRECISION = "bf16"


def answer(logits, tokens):
    every = torch.log_softmax(logits[:, :-1], dim=-1)
    chosen = every.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
    return chosen.sum(dim=-1)  # <- here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.head = nn.Linear(16, 96)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def loss(model, batch):
    good, bad = batch
    margin = answer(model(good), good) - answer(model(bad), bad)
    return -F.logsigmoid(0.5 * margin).mean()


def task():
    good = data(8, 64).mul(1e3).long() % 96
    bad = good.clone()
    bad[:, 60:] = data(8, 4).mul(1e4).long() % 96
    return make(Model, (good, bad), loss)
