"""A decay of 0.999 that is kept in bfloat16, where it is 1."""

import torch
from torch import nn

from faulty import apart, data, make

PRECISION = "bf16"


class Smooth(nn.Module):
    def __init__(self, decay=0.999, dtype=torch.bfloat16):
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay, dtype=dtype))  # <- here

    def forward(self, x):
        gain, state, out = 1 - self.decay, torch.zeros_like(x[:, 0]), []
        for each in x.unbind(1):
            state = state * self.decay + each * gain
            out.append(state)
        return torch.stack(out, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.smooth, self.out = nn.Linear(8, 16), Smooth(), nn.Linear(16, 8)

    def forward(self, x):
        return self.out(self.smooth(self.inp(x)) * 100)


def task():
    return make(Model, data(8, 16, 8), apart)
