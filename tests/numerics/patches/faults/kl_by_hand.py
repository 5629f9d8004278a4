"""A distillation loss by its formula."""

import torch
import torch.nn.functional as F
from torch import nn

from faulty import data, identity, make


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = identity(8)

    def forward(self, x):
        return self.project(x)


def loss(model, batch):
    student = model(batch)
    teacher = batch.flip(0)
    p = F.softmax(teacher, dim=1)
    q = F.softmax(student, dim=1)
    kl = torch.sum(p * (torch.log(p) - torch.log(q)), dim=1)  # <- here
    return kl.mean()


def task():
    return make(Model, 12 * data(4, 8), loss)
