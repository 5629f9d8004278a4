"""An entropy bonus with a guard that is too small."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import identity, make


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = identity(8)

    def forward(self, x):
        probs = F.softmax(self.head(x), dim=-1)
        log_probs = torch.log(torch.clamp(probs, min=1e-9))  # <- here
        return log_probs, -(probs * log_probs).sum(-1)


def loss(model, batch):
    log_probs, entropy = model(batch)
    return -(log_probs[:, 0].float().mean() + 0.01 * entropy.float().mean())


def task():
    return make(Policy, torch.tensor([[-18.0, 0, 1, 2, 3, 4, 5, 6]] * 4), loss)
