"""Where a value was lost is told apart from where it shows: in another function, or line."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.observe.ancestry import Ancestor, flushed_first, is_of_one_sign
from ampwise.numerics.observe.shadow import shadow
from ampwise.numerics.observe.shares import brought, roundings
from ampwise.places import NOWHERE, Place
from ampwise.step import TrainStep
from ampwise.step.replay import Replay
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
    squared = replace(later, parents=(first,), flushed=100, flushed_share=0.2)
    assert flushed_first(squared) is squared  # of three the argument was 0 before
    spread = replace(first, flushed_share=0.2)
    assert flushed_first(replace(squared, parents=(spread,))) is spread
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


class Values(nn.Module):
    """Large values come out of 16 bits, and a reward in float32 is added much later."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 1)
        nn.init.constant_(self.lin.bias, 700.0)

    def forward(self, x):
        return self.lin(x).squeeze(-1)  # <- here


def temporal_difference(model, batch):
    now, later = model(batch), model(batch.flip(0)).detach()
    return (1.0 + 0.999 * later - now).square().mean()


def test_rounding_is_placed_in_the_function_that_spoiled_a_value_first():
    found = diagnose(task(Values, temporal_difference, data(64, 8)), "bf16", steps=1)
    assert found.cause == "CANCELLATION"
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("addmm", line_of(Values))
    assert "is kept in bfloat16 at a spacing of 4. sub on line" in found.explanation
    first = next(each for each in found.fixes if each.what.startswith("line "))
    assert first.verified
    assert first.what == f"line {found.origin.line} in float32"


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x):
        logp = torch.log_softmax(self.head(x), -1).to(torch.bfloat16)
        return logp[..., 0].sum(-1)  # <- here


class Ratio(nn.Module):
    """The probability of a sequence beside that of a model some updates ago."""

    def __init__(self):
        super().__init__()
        self.now = Tokens()
        self.old = copy.deepcopy(self.now).requires_grad_(False)
        with torch.no_grad():
            for each in self.old.parameters():
                each.add_(0.004 * torch.randn_like(each))

    def forward(self, x):
        return torch.exp(self.now(x) - self.old(x))


def test_a_sum_that_rounds_before_a_difference_in_16_bits_is_where_it_began():
    found = diagnose(task(Ratio, apart, data(32, 128, 8), lr=1e-9), "bf16", steps=1)
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("sum", line_of(Tokens))
    assert re.search(
        r"sum on line \d+ rounds: -5\d\d is kept in bfloat16 at a spacing of 4\. sub on line \d+ "
        r"takes a difference of at most [\d.]+ of such numbers",
        found.explanation,
    )


def _ancestor(index, own, error, *before, line=1, extreme=1.0):
    place = Place("forward", "", 0, __file__, line)
    shares, parents = [each[0] for each in before], [each[1] for each in before]
    return Ancestor(
        "mul", place, "bfloat16", 50.0, 50.0, (), tuple(parents), extreme=extreme,
        error=error, own=own, brought=tuple(shares), index=index,
    )  # fmt: skip


def test_the_first_rounding_counts_that_brings_about_as_much_as_the_largest():
    early = _ancestor(1, 1.0, 1.0, line=1)
    late = _ancestor(2, 1.5, 1.8, (1.0, early), line=2)
    assert roundings([(1.8, late)]) == [early, late]


def test_a_rounding_that_hardly_comes_through_is_not_where_it_began():
    early = _ancestor(1, 1.0, 1.0, line=1)
    late = _ancestor(2, 1.5, 1.5, (0.01, early), line=2)
    assert roundings([(1.5, late)]) == [late]


def test_an_error_is_followed_along_the_argument_that_brings_it():
    larger = _ancestor(1, 1.0, 1.0, line=1, extreme=1e6)  # a rounding that goes nowhere
    small = _ancestor(2, 1.0, 1.0, line=2)
    joined = _ancestor(3, 0.0, 1.0, (1e-4, larger), (1.0, small), line=3)
    assert roundings([(1.0, joined)]) == [small]
    assert roundings([(0.0, larger)]) == []


def test_of_one_line_that_rounds_again_and_again_the_largest_number_is_told():
    last = _ancestor(0, 1.0, 1.0, extreme=1.0)
    for index in range(1, 9):
        last = _ancestor(index, 1.0, 1.4, (1.0, last), extreme=1.0 + index)
    assert roundings([(1.4, last)]) == [last]


def test_each_argument_brings_its_own_error():
    given = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    raised = torch.tensor([1.5, 2.0]).double(), torch.tensor([3.0, 4.5]).double()
    made_by = [_ancestor(1, 0.5, 0.5), _ancestor(2, 0.5, 0.5)]
    product = torch.ops.aten.mul.Tensor
    assert brought(product, (given, {}), (raised, {}), made_by) == [1.5, 1.0]
    assert brought(product, (given, {}), (raised, {}), [None, made_by[1]]) == [0.0, 1.0]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.one(x)
        h[:, :4].add_(self.two(x)[:, :4])
        return torch.exp(h)


def test_arguments_of_an_operation_in_place_are_those_before_it():
    model = InPlace()
    step = Replay(TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16"))
    stash = step.rehearsal(lambda step, x: step.micro_batch(apart, x), [data(4, 8)])
    shown = next(each for each in shadow(step, stash).errors if each.name == "exp")
    at = (shown.name, shown.place, shown.occurrence)
    maker = shadow(step, stash, errors=False, at=at, shares=True).makers[0]
    assert maker is not None
    assert maker.name == "add_"
    pairs = zip(maker.brought, maker.parents, strict=True)
    assert all(0 < share <= each.error for share, each in pairs)


class Bins(nn.Module):
    """The log-probability of a bin, between sigmoids that nearly agree, of an input that rounds."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = x.to(torch.bfloat16)
        return self.of_a_bin(self.moved(x * 1.37))

    def moved(self, x):
        return x - self.mean.to(x.dtype)

    def of_a_bin(self, x):
        upper, lower = torch.sigmoid(x + 0.004), torch.sigmoid(x)
        return torch.log(upper - lower + 1e-7)  # <- here


def test_a_rounding_that_does_no_harm_by_itself_is_not_blamed():
    def unlikely(model, batch):
        return -model(batch).float().mean()

    found = diagnose(task(Bins, unlikely, data(16, 8)), "bf16", steps=1)
    assert found.origin is not None
    assert (found.cause, found.origin.line) == ("CANCELLATION", line_of(Bins.of_a_bin))


class Decayed(nn.Module):
    """An average without its bias, whose decay is a tensor in the format of the values."""

    def __init__(self, decay=0.999):
        super().__init__()
        self.lin, self.decay = nn.Linear(8, 8), decay

    def forward(self, x):
        h = self.lin(x)
        decay = h.new_tensor(self.decay)
        return (1 - decay) * h.square().mean(0) / (1 - decay)  # <- here


def test_a_number_that_rounded_to_1_as_a_tensor_is_no_fault_of_the_model():
    found = diagnose(task(Decayed, apart, data(4, 8)), "bf16", steps=1)
    assert found.origin is not None
    assert (found.cause, found.origin.line) == ("CANCELLATION", line_of(Decayed.forward))
    assert "rounded to 1" in found.explanation
    assert (
        diagnose(task(lambda: Decayed(0.5), apart, data(4, 8)), "bf16", steps=1).status == "clean"
    )


class Decays(nn.Module):
    """Differences of sums that round, of rates that round, too, and to no harm."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Linear(8, 1)

    def forward(self, x):
        return self.matrix(self.rate(x))

    def rate(self, x):
        return torch.nn.functional.softplus(self.rates(x)).squeeze(-1).to(torch.bfloat16)

    def matrix(self, rate):
        total = torch.cumsum(-rate, -1)  # <- here
        return torch.exp((total.unsqueeze(-1) - total.unsqueeze(-2)).tril())


def test_where_the_first_rounding_is_harmless_the_next_is_looked_at():
    found = diagnose(task(Decays, apart, data(2, 512, 8)), "bf16", steps=1)
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("cumsum", line_of(Decays.matrix))


@pytest.mark.parametrize(
    ("numbers", "is_so"), [([1.0, 2.0, 0.0], True), ([-1.0, -2.0], True), ([1.0, -1.0], False)]
)
def test_a_sum_of_one_sign_cancels_nothing(numbers, is_so):
    ideal = (torch.tensor(numbers, dtype=torch.float64), [0])
    assert is_of_one_sign("sum", ideal) is is_so
    assert not is_of_one_sign("sub", ideal)
    lost = Ancestor("sum", NOWHERE, "float16", 60.0, 0.0, (), (), of_one_sign=is_so)
    assert lost.cancels is not is_so
