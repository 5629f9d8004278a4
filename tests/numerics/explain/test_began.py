"""Where a value was lost is told apart from where it shows: in another function, or line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.observe.ancestry import Ancestor, flushed_first
from ampwise.places import Place
from tests.numerics.cases import apart, data, line_of, task


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_zeros_are_followed_to_the_operation_that_made_them_first():
    place = Place("forward", "", 0, __file__, 1)
    exact = Ancestor("exp", place, "float16", 60.0, 60.0, (), ())
    first = Ancestor("mul", place, "float16", 60.0, 60.0, (), (exact,), flushed=3)
    later = Ancestor("mul", place, "float16", 60.0, 60.0, (), (exact, first), flushed=3)
    assert flushed_first(later) is first
    assert flushed_first(exact) is None
    assert flushed_first(None) is None


def likelihood(emission):
    total = emission[:, 0]
    for each in emission.unbind(1):
        total = total * each * 1e-2  # <- here
    return total


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return likelihood(self.lin(x).sigmoid())


def log_likelihood(model, batch):
    return -model(batch).log().float().mean()


def test_an_underflow_in_another_function_is_placed_there():
    found = diagnose(task(Sequence, log_likelihood, data(4, 8)), "fp16", steps=1)
    assert found.cause == "UNDERFLOW"
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("mul", _line("total = total * each"))
    assert f"mul on line {found.origin.line} made them so" in found.explanation


def _line(text):
    with open(__file__) as file:
        return next(i for i, each in enumerate(file, 1) if text in each)


class Density(nn.Module):
    """A variance in 16 bits under a float32 number."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        nn.init.constant_(self.lin.bias, -9.0)

    def forward(self, x):
        std = torch.exp(self.lin(0 * x))
        var = std**2
        return x / (2 * var)  # <- here


def test_the_format_of_the_argument_that_is_0_is_told():
    found = diagnose(task(Density, apart, data(8, 8)), "fp16", steps=1)
    assert (found.cause, found.origin and found.origin.line) == ("UNDERFLOW", line_of(Density))
    assert "smallest number of float16 is 6e-08" in found.explanation
    assert f"pow on line {line_of(Density) - 1} made them so" in found.explanation


class Discount(nn.Module):
    """0.998 is 0.996 in bfloat16, and its powers are others altogether."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 400)

    def forward(self, x):
        h = self.lin(x)
        rate = torch.full((400,), 0.998, dtype=h.dtype)  # <- here
        return h * torch.cumprod(rate, 0)


def test_a_constant_that_grows_wrong_is_placed_where_it_was_rounded():
    found = diagnose(task(Discount, apart, data(8, 8)), "bf16", steps=1)
    assert (found.cause, found.origin and found.origin.line) == (
        "PRECISION_LOSS", line_of(Discount),
    )  # fmt: skip
    assert "makes a small error large" in found.explanation


class Constant(nn.Module):
    """One channel does not change over the batch."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x):
        h = self.lin(x).float() * torch.tensor([1.0, 0, 1, 1])
        return (h - h.mean(0)) / h.std(0)  # <- here


def test_a_division_by_0_says_how_many_and_of_what():
    found = diagnose(task(Constant, apart, data(8, 8)), "fp16", steps=1)
    assert found.cause == "DOMAIN_ERROR"
    assert "1 of 4 divisors is 0, made by std on line" in found.explanation
    assert "the spread of values that are all the same: 0 / 0 is NaN" in found.explanation


class Nearby(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        gap = (self.lin(x) * 1e-3).pow(2).sum(-1)
        return torch.acosh(1 + gap)  # <- here


def test_an_operation_of_a_derivative_is_called_that():
    found = diagnose(task(Nearby, apart, data(8, 8)), "fp16", steps=1)
    assert found.origin is not None
    assert found.origin.line == line_of(Nearby)
    assert "in its backward," in found.explanation
