"""Where parameters get their 16 bits: the line that decides it, whatever is made of them since."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ampwise.bench.arm import Settings
from ampwise.numerics.observe.narrow import casts_of_float32, makers
from ampwise.tasks import Task
from tests.numerics.cases import line_of

BF16 = torch.bfloat16


class Linear(nn.Module):
    """A module with a weight, made in a way of its own."""

    def __init__(self):
        super().__init__()
        self.make()

    def forward(self, x):
        return x @ self.weight


class Table(Linear):
    def make(self):
        self.inner = nn.Embedding(4, 4, dtype=BF16)  # <- here


class Cast(Linear):
    def make(self):
        self.weight = nn.Parameter(torch.randn(4, 4).to(BF16))  # <- here


class Scaled(Linear):
    """The format is that of the random numbers, not of what is made of them."""

    def make(self):
        drawn = torch.randn(4, 4, dtype=BF16)  # <- here
        self.weight = nn.Parameter(0.02 * drawn.clone().t())


class Data(Linear):
    def make(self):
        self.inner = nn.Linear(4, 4)
        for each in self.inner.parameters():
            each.data = each.data.bfloat16()  # <- here


class Module(Linear):
    def make(self):
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.inner.to(BF16)  # <- here


class Copied(Linear):
    def make(self):
        first = nn.Linear(4, 4).half()  # <- here
        self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(2))


class Half(Linear):
    """Two ways in a model."""

    def make(self):
        self.left = nn.Linear(4, 4, dtype=BF16)  # <- here
        self.right = nn.Linear(4, 4)


def found(model):
    task = Task(model=model, batches=list, loss=lambda m, b: m(b).sum())
    return makers(task, Settings(torch.device("cpu")))


@pytest.mark.parametrize("kind", [Table, Cast, Scaled, Data, Module, Copied, Half])
def test_the_line_that_decides_the_format_is_named(kind):
    made, narrow = found(kind), torch.float16 if kind is Copied else BF16
    named = {name for name, each in kind().named_parameters() if each.dtype != torch.float32}
    assert set(made) == named
    assert {each.place.line for each in made.values()} == {line_of(kind)}
    assert {each.dtype for each in made.values()} == {str(narrow).removeprefix("torch.")}


def test_so_is_a_cast_in_the_function_that_gives_the_model():
    def model():
        return nn.Linear(4, 4).bfloat16()  # <- here

    assert {each.place.line for each in found(model).values()} == {line_of(model)}


def test_of_what_was_made_before_nothing_is_known():
    model = nn.Linear(4, 4).bfloat16()
    assert found(lambda: model) == {}
    assert found(lambda: copy.deepcopy(model)) == {}
    assert found(lambda: nn.Linear(4, 4)) == {}


def test_random_numbers_are_drawn_as_before():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    found(Cast)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("kind", "cast"),
    [(Table, False), (Cast, True), (Scaled, False), (Data, True), (Module, True), (Half, False)],
)
def test_a_line_that_casts_float32_is_known(kind, cast):
    lines = {line for _, line in casts_of_float32(found(kind))}
    assert lines == ({line_of(kind)} if cast else set())
