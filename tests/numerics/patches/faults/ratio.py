"""A ratio of probabilities of whole sequences, from terms that were rounded before."""

from dataclasses import replace

import torch
from torch import nn

from faulty import data, make

PRECISION = "bf16"


def sequence_logp(logits, tokens):
    logp = logits[:, :-1].log_softmax(dim=-1)
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen.sum(dim=-1)  # <- here


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.project = nn.Linear(8, 64)
            self.project.weight.data.mul_(0.1)
            self.project.bias.data.zero_()

    def forward(self, x):
        return self.project(x)


@torch.no_grad()
def before(x, tokens):
    return sequence_logp(Model()(x) + 0.001 * x.repeat(1, 1, 8), tokens)


def loss(model, batch):
    x, tokens, old = batch
    ratio = torch.exp(sequence_logp(model(x), tokens) - old)
    advantage = torch.ones(len(x))
    advantage[::2] = -1
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def sequences(length):
    x = data(16, length, 8)
    with torch.autocast("cpu", enabled=False):
        tokens = (x.sum(dim=-1) * 1e3).long() % 64
        return x, tokens, before(x, tokens)


def task():
    short, long = sequences(64), sequences(128)
    made = make(Model, short, loss)
    return replace(made, batches=lambda: [short] * 6 + [long] * 12)
