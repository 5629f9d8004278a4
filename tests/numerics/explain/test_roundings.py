"""What was lost, told by the elements: those that left the range, small terms, coarse numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain.roundings import absorbed, off_by
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.range_losses import RangeLosses
from ampwise.places import Place
from ampwise.tasks import Task
from tests.numerics.cases import data, line_of

HERE = Place("forward", "", 0, __file__, 1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def task(model, loss, batch) -> Task:
    return Task(
        model=model,
        batches=lambda: [batch] * 4,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
        name="roundings",
    )


def to_itself(model, batch):
    return F.mse_loss(model(batch).float(), batch)


@pytest.mark.parametrize(
    ("kept_db", "said"),
    [
        (60, "0.1%"),
        (20, "10%"),
        (0, "100%"),
        (-20, "10 times its size"),
        (-math.inf, "an unbounded factor"),
    ],
)
def test_an_error_is_said_beside_its_size(kept_db, said):
    assert off_by(kept_db) == said


def test_what_left_the_range_is_counted_by_elements():
    wanted = torch.tensor([1.0, 1e-9, 3e-8, 3.3e-5, 1e-3, 7e4, 0.0], dtype=torch.float64)
    losses = RangeLosses()
    losses.note("mul", HERE, wanted.half(), wanted)
    over, under = losses.found
    assert (over.elements, over.most) == (1, 7e4)
    assert (under.elements, under.zeros) == (2, 1)  # 3.3e-5 is subnormal, and loses nothing more
    losses.note("mul", HERE, wanted[:2].half(), wanted[:2])  # a call that loses less
    assert losses.found == [over, under]


@pytest.mark.parametrize(
    ("name", "terms", "said"),
    [
        ("add", (torch.full((4,), 200.0), 0.5), "adds 0.5 to numbers of about 200"),
        ("sub", (torch.ones(4), torch.full((4,), 1e-3)), "subtracts numbers of about 0.001 from"),
        ("rsub", (torch.full((4,), 1e-3), 1.0), "subtracts numbers of about 0.001 from 1"),
        ("add", (torch.ones(4), torch.ones(4)), ""),
    ],
)
def test_a_sum_says_which_terms_it_loses(name, terms, said):
    error = OperationError(0, name, HERE, "bfloat16", 40.0, 40.0, math.inf)
    words = absorbed(error, terms, {})
    assert said in words
    assert bool(words) == bool(said)


class Preconditioned(nn.Module):
    """Divided by the root of a square that overflows for some samples: these become 0."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        level = (1000 * x[:, :1].abs()).half()
        size = (level.square() + 1).sqrt()  # <- here
        return self.lin(level * x / size)


def test_an_overflow_that_a_division_hides_is_one():
    batch = data(64, 8)
    batch[:, 0] = torch.linspace(0.02, 0.28, 64)
    found = diagnose(task(Preconditioned, to_itself, batch), "fp16", steps=3)
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW"), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(Preconditioned)
    assert "become inf: they should be up to 78,400" in found.explanation
    assert found.extent is not None
    assert found.extent.elements == 6


class Joint(nn.Module):
    """The probability of two events: most are too small for float16, the largest are not."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        seldom = torch.tensor([1.0, 1.0, *[1e-4] * 6]).half()
        once = self.lin(x).sigmoid() * seldom
        twice = once * seldom  # <- here
        return twice.float().clamp(min=1e-12).log()


def test_an_underflow_of_most_elements_is_one_though_the_norm_is_there():
    found = diagnose(task(Joint, to_itself, data(32, 8)), "fp16", steps=3)
    assert (found.status, found.cause) == ("fault", "UNDERFLOW"), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(Joint)
    assert "192 of 256 results of mul" in found.explanation


class Iterated(nn.Module):
    """Steps of an iteration that are too small for what they are added to."""

    def __init__(self):
        super().__init__()
        self.first, self.step = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        state = 4 + self.first(x)
        for _ in range(24):
            state = state + 2e-3 * torch.tanh(self.step(x))  # <- here
        return state - 4


def test_small_terms_of_a_sum_are_named_where_they_are_lost():
    loss = lambda m, b: 100 * F.mse_loss(m(b).float(), m.first(b).float() + 0.05)  # noqa: E731
    found = diagnose(task(Iterated, loss, data(32, 8)), "bf16", steps=3)
    assert (found.status, found.cause) == ("fault", "PRECISION_LOSS"), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(Iterated)
    assert "most of the smaller are rounded away" in found.explanation


class Bumped(nn.Module):
    """A derivative of a network by a small bump: the difference is its rounding."""

    def __init__(self):
        super().__init__()
        first, last = (nn.Linear(*sizes, bias=False) for sizes in ((8, 32), (32, 1)))
        self.layers = nn.Sequential(first, nn.Softplus(), last)

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def slope(model, x):
    up, down = model(x + 1.5e-3), model(x - 1.5e-3)
    return (up - down) / 3e-3  # <- here


def test_the_difference_of_what_layers_round_is_at_fault_and_not_the_layers():
    loss = lambda m, b: F.mse_loss(slope(m, b).float(), b.sum(1))  # noqa: E731
    found = diagnose(task(Bumped, loss, data(256, 8)), "fp16", steps=3)
    assert (found.status, found.cause) == ("fault", "CANCELLATION"), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(slope)


class Drawn(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.lin, self.dtype = nn.Linear(8, 8), dtype

    def forward(self, x):
        draws = torch.rand(64, 8, dtype=self.dtype)  # <- here
        return self.lin(x) - 0.1 * draws.log()


class Negative(Drawn):
    """Not the draw is at fault: there is no logarithm of what is made of it."""

    def forward(self, x):
        draws = torch.rand(64, 8, dtype=self.dtype)
        return self.lin(x) - 0.1 * (draws - 2).log()  # <- here


def test_a_draw_in_16_bits_that_is_0_is_at_fault():
    found = diagnose(task(Drawn, to_itself, data(64, 8)), "bf16", steps=4)
    assert (found.status, found.cause) == ("fault", "PRECISION_LOSS"), found.explanation
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("rand", line_of(Drawn))
    assert "has 256 numbers from 0 to 1" in found.explanation


def test_a_draw_is_not_at_fault_where_no_digits_help():
    found = diagnose(task(Negative, to_itself, data(64, 8)), "bf16", steps=4)
    assert (found.status, found.cause) == ("fault", "DOMAIN_ERROR"), found.explanation
