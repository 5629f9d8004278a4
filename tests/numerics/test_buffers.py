"""Buffers that forward makes inf or NaN: found in the step that did, not in the one that fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from tests.numerics.cases import data, square, task


class Followed(nn.Module):
    """Scales its input by a statistic of the steps before, which overflows in float16."""

    rebound = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("energy", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def statistic(self, h):
        return (300 * h.half()).square().sum(0)  # <- here

    def forward(self, x):
        h = self.linear(x) / self.energy.sqrt()
        with torch.no_grad():
            self.steps += 1
            if self.steps == 3:
                new = self.statistic(h).float()
                if self.rebound:
                    self.energy = torch.lerp(self.energy, new, 0.5)
                else:
                    self.energy.lerp_(new, 0.5)
        return h


class Rebound(Followed):
    rebound = True


class Observed(nn.Module):
    """Keeps a range that begins as nothing, and a mask that is made by its first forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("least", torch.full((), torch.inf))
        self.register_buffer("mask", torch.zeros(8, 8))

    def forward(self, x):
        h = self.linear(x)
        self.least.copy_(torch.minimum(self.least, h.detach().float().min()))
        self.mask.fill_(-torch.inf).triu_(1)
        return torch.softmax(h[:8].float() + self.mask, -1) - self.least


def broken_at(model: type[nn.Module], *, steps: int = 6):
    return diagnose(task(model, square, data(64, 8)), "fp16", steps=steps)


@pytest.mark.parametrize("model", [Followed, Rebound])
def test_the_step_is_found_that_spoilt_a_buffer(model):
    found = broken_at(model)
    assert (found.status, found.step) == ("fault", 3)
    assert found.cause == "RANGE_OVERFLOW"
    assert found.target == "buffer energy"
    assert "# <- here" in found.origin.source
    assert "It stays in the buffer energy, which later steps read." in found.explanation
    assert any(each.verified for each in found.fixes)
    # bfloat16 has the range, clipping the batch has not: what leaves inf in the buffer is no fix.
    assert all("buffer" not in each.cost for each in found.fixes if each.verified)


def test_infinities_that_are_meant_are_no_fault():
    assert broken_at(Observed).status == "clean"
