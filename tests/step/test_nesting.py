"""A step inside a forward: refused on the same parameters, in the same thread; else nobody's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from ampwise.errors import UsageError
from ampwise.step import Engine, TrainStep

from .helpers import batches, classify, mlp


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def model():
    return mlp()


@pytest.fixture
def step(model):
    return TrainStep(model, sgd(model), policy="bf16")


@pytest.mark.parametrize("what", ["step()", "iterate()", "update()"])
def test_a_step_inside_its_own_forward_is_refused(step, what):
    batch = batches(1)[0]
    calls = {
        "step()": lambda: step(classify, batch),
        "iterate()": lambda: step.iterate(lambda _, batch: batch, batch),
        "update()": step.update,
    }
    with step.autocast(), pytest.raises(UsageError) as raised:
        calls[what]()
    assert str(raised.value).startswith(f"{what} inside a forward of the same step")
    step(classify, batch)
    assert step.steps == 1


def test_one_on_the_same_model_is_refused_and_one_on_another_is_not(step, model):
    batch = batches(1)[0]
    other = mlp()
    with Engine(model, sgd(model), policy="fp32").autocast():
        with pytest.raises(UsageError, match="inside a forward of another step on the same model"):
            step(classify, batch)
        unrelated = TrainStep(other, sgd(other), policy="fp32")
        unrelated(classify, batch)
    assert (step.steps, unrelated.steps) == (0, 1)


def test_a_forward_in_another_thread_is_no_matter(step):
    batch = batches(1)[0]
    with ThreadPoolExecutor(1) as another:
        context = step.autocast()
        another.submit(context.__enter__).result()
        try:
            with pytest.raises(UsageError, match="without a backward"):
                step.update()
        finally:
            another.submit(context.__exit__, None, None, None).result()
    step(classify, batch)
    assert step.steps == 1
