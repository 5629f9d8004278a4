"""What is told about a fix: words that help, and no cost that nobody has measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from tests.numerics.cases import data, square, task


class Exponential(nn.Module):
    def __init__(self, function, argument: float):
        super().__init__()
        self.lin, self.function, self.argument = nn.Linear(4, 4), function, argument

    def forward(self, x):
        return self.function(self.lin(x).float() * 0 + self.argument)


class Guarded(nn.Module):
    """Raises as soon as something is not finite, early in its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(64, 64), nn.Sequential(*[nn.Linear(64, 64)] * 8)

    def forward(self, x):
        large = self.first(x) * 1e6
        if not torch.isfinite(large).all():
            raise ValueError("not finite")
        return self.rest(large) * 1e-6


@pytest.mark.parametrize(
    ("function", "argument", "cause", "most"),
    [
        (torch.exp, 1000.0, "DOMAIN_ERROR", 88.7),
        (torch.exp, 100.0, "RANGE_OVERFLOW", 88.7),
        (torch.exp2, 2000.0, "DOMAIN_ERROR", 127.9),
        (torch.cosh, 1000.0, "DOMAIN_ERROR", 88.7),
    ],
)
def test_a_clamp_is_tried_on_an_exponential_that_overflows(function, argument, cause, most):
    def model():
        return Exponential(function, argument)

    found = diagnose(task(model, square, data(4, 4)), "bf16", steps=2)
    assert found.cause == cause
    fix = next(each for each in found.fixes if "keep the argument" in each.what)
    assert fix.cost.startswith("tried:") or fix.verified
    assert f"max={most:g})" in fix.how
    assert math.isfinite(function(torch.tensor(most)))
    assert not any("domain" in each.how for each in found.fixes)


def test_another_fault_of_the_domain_is_told_to_clamp_into_it():
    found = diagnose(task(lambda: Exponential(torch.log, -1.0), square, data(4, 4)), "bf16")
    assert "clamp the argument into the function's domain" in found.fixes[0].how


def test_a_step_that_raises_has_no_time_that_a_fix_could_be_measured_against():
    found = diagnose(task(Guarded, square, data(32, 64)), "fp16", steps=2)
    verified = [each for each in found.fixes if each.verified]
    assert verified
    for each in verified:
        assert each.cost.startswith("cost not measured: without it the step raises")
        assert each.step_time_ratio is None
        assert each.activation_bytes is None


def test_neither_has_one_that_raises_in_backward():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            large = self.lin(x) * 1e6
            large.register_hook(self.look)
            self.seen = large.detach()
            return large * 1e-6

        def look(self, gradient):
            if not torch.isfinite(self.seen).all():
                raise ValueError("not finite")

    found = diagnose(task(Late, square, data(4, 8)), "fp16", steps=2)
    verified = [each for each in found.fixes if each.verified]
    assert verified
    assert all(each.step_time_ratio is None for each in verified)


def test_the_words_of_an_error_end_with_one_full_stop():
    class Verbose(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            y = self.lin(x)
            if y.dtype != torch.float32:
                raise TypeError("see the manual for more information.")
            return y

    found = diagnose(task(Verbose, square, data(4, 8)), "bf16", steps=2)
    assert found.cause == "DTYPE_ERROR"
    assert "more information. In float32" in found.explanation
