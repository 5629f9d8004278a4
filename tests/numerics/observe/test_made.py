"""Numbers that are rounded where a model is made, or on the way through helpers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.constants import ORIGINALS, Original, originals
from ampwise.places import NOWHERE
from tests.numerics.cases import data, line_of, task

BF16 = torch.bfloat16


class Decayed(nn.Module):
    """Multiplies by how far a decay is from 1."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.make()

    def forward(self, x):
        return self.project(x) * (1 - self.decay) * 1e3


class InBuffer(Decayed):
    def make(self):
        self.register_buffer("decay", torch.tensor(0.999, dtype=BF16))  # <- here


class InAttribute(Decayed):
    def make(self):
        self.decay = torch.tensor(0.999).to(BF16)  # <- here


class OfASum(Decayed):
    def make(self):
        rates = torch.full((4,), 0.00025, dtype=BF16)
        self.register_buffer("decay", 1 - rates.sum())  # <- here


class Full(Decayed):
    """Through a helper, in forward."""

    def make(self):
        pass

    def forward(self, x):
        h = self.project(x)
        return h * full(h, 0.997) ** torch.arange(0, 400, 50)


def full(like, number):
    return torch.full((), number, dtype=like.dtype)  # <- here


class Counted(Decayed):
    """What training writes is not what it was when it was made."""

    def make(self):
        self.register_buffer("decay", torch.tensor(0.999, dtype=BF16))

    def forward(self, x):
        with torch.no_grad():
            self.decay.fill_(0.5)
        return super().forward(x)


class Turned(nn.Module):
    """A table of sines in bfloat16 is as exact as what it is multiplied with."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8).float().sin().to(BF16))

    def forward(self, x):
        return self.project(x) * self.table


def loss(model, batch):
    return (model(batch).float() - batch).pow(2).mean()


@pytest.mark.parametrize("model", [InBuffer, InAttribute, OfASum], ids=lambda each: each.__name__)
def test_what_was_rounded_when_the_model_was_made_is_found_there(model):
    found = diagnose(task(model, loss, data(8, 8)), "bf16", steps=4)
    assert found.status == "fault"
    assert found.origin.line == line_of(model.make), found.explanation


def test_a_number_that_most_of_an_error_comes_from_is_a_fault_below_20_db():
    found = diagnose(task(Full, loss, data(8, 8)), "bf16", steps=4)
    assert (found.status, found.origin.line) == ("fault", line_of(full)), found.explanation


@pytest.mark.parametrize("model", [Counted, Turned], ids=lambda each: each.__name__)
def test_other_buffers_in_16_bits_are_none(model):
    assert diagnose(task(model, loss, data(8, 8)), "bf16", steps=4).status == "clean"


def test_what_one_model_was_made_of_is_no_matter_of_another():
    one, other = nn.Module(), nn.Module()
    for model in (one, other):
        model.register_buffer("decay", torch.tensor(0.999, dtype=BF16))
        maker = Ancestor("tensor", NOWHERE, "bfloat16", 0.0, 50.0, (), ())
        exact = torch.tensor(0.999, dtype=torch.float64)
        ORIGINALS[model.decay] = Original(model.decay.clone(), exact, maker)
    assert [tensor is one.decay for tensor, _ in originals([one])] == [True]
    one.decay.add_(1)
    assert list(originals([one])) == []
