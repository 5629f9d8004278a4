"""Causes that show behind a derivative, a division, or a decision, and are told where they are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from tests.numerics.cases import apart, data, line_of, square, task
from tests.numerics.explain.test_causes import origin_line, verified


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Dark(nn.Module):
    """The derivative of the root divides by twice its result: 2.1e-4, all but for the eps."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        return torch.sqrt(self.lin(x) ** 2 + 1e-8)  # <- here


def test_an_eps_under_a_root_is_told_though_little_is_beside_it():
    found = diagnose(task(Dark, apart, torch.full((4, 4), 3.2e-5)), "fp16", steps=2)
    assert (found.cause, found.phase) == ("EPS_UNDERFLOW", "backward")
    assert origin_line(found) == line_of(Dark)


# -- what an infinity leaves -----------------------------------------------------------------------


class Shares(nn.Module):
    """A number over a sum that is inf is 0, and its logarithm is not finite."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        each = torch.exp(self.lin(x))
        total = each[:, 0] + each[:, 1]  # <- here
        return torch.log(each[:, 0] / total)


def test_zeros_that_an_overflow_leaves_are_told_by_the_overflow():
    found = diagnose(task(Shares, apart, torch.full((4, 4), 10.8)), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("RANGE_OVERFLOW", line_of(Shares))
    assert re.search(r"are 0 and should be 0\.5: add on line \d+ gives inf, where it would be \d",
                     found.explanation)  # fmt: skip
    assert any("in float32" in each for each in verified(found))


# -- what rounding decides --------------------------------------------------------------------------


class Spread(nn.Module):
    """The determinant of a variance that came out negative: NaN that `logdet` chooses."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        h = self.lin(x)
        second, mean = h.T @ h / len(h), h.mean(0)
        covariance = second - mean[:, None] * mean  # <- here
        return torch.logdet(covariance.float() + 1e-3 * torch.eye(2))


def test_what_rounding_decides_is_not_blamed_on_the_model():
    batch = torch.tensor([11.5, 23.0]) + 0.06 * data(64, 2, seed=5)
    found = diagnose(task(Spread, square, batch), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("CANCELLATION", line_of(Spread))
    assert "takes a value that is not finite (scalar_tensor), to which float64 does" in (
        found.explanation
    )
    assert "the function around line" in " ".join(verified(found))
