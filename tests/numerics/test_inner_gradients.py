"""Gradients that forward asks for: no loss scale lifts them, and they stand on the line that asks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.tasks import Task
from tests.numerics.cases import data, line_of


class Forces(nn.Module):
    """The gradient of an energy in a small unit, which float16 loses step by step."""

    unit = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, places):
        places = places.requires_grad_()
        energy = self.net(places).mean() * self.unit
        forces = torch.autograd.grad(energy, places, create_graph=True)[0]  # <- here
        return forces / self.unit


class LargeForces(Forces):
    unit = 100.0


class Penalty(nn.Module):
    """A slope that is flushed by one product; what forward gives is computed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        x = x.requires_grad_()
        score = self.body(x)
        slope = torch.autograd.grad(score.mean() / 8192, x, create_graph=True)[0]  # <- here
        return (slope * 8192 * len(x)).norm(dim=1) - 1


def of(model) -> Task:
    batch = data(64, 12)
    return Task(
        model=model,
        batches=lambda: [batch] * 6,
        loss=lambda m, b: m(b).square().mean(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    )


@pytest.mark.parametrize("model", [Forces, Penalty])
def test_one_that_underflows_is_a_fault_on_the_line_that_asks(model):
    torch.manual_seed(0)
    found = diagnose(of(model), "fp16", steps=6)
    assert (found.status, found.phase) == ("fault", "forward"), found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(model)
    fix = next(each for each in found.fixes if "4096 times the value" in each.what)
    assert fix.verified, fix


def test_one_that_the_format_holds_is_none():
    torch.manual_seed(0)
    found = diagnose(of(LargeForces), "fp16", steps=6)
    assert (found.status, found.findings) in [("clean", []), ("benign", [])], found.explanation


def test_a_backward_is_still_one():
    """The step's own is not asked for by forward: what it loses stands where forward made it."""
    torch.manual_seed(0)
    task = Task(
        model=lambda: nn.Linear(8, 8),
        batches=lambda: [data(4, 8)] * 3,
        loss=lambda m, b: F.relu(m(b)).float().mean() * 0 + (m(b) * 0).float().sqrt().sum(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    assert diagnose(task, "fp16", steps=3).phase == "backward"
