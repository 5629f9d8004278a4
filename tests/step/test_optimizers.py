"""What is around an optimizer's step is left out only where nobody would miss it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from ampwise import TrainStep
from tests.step.helpers import classify


def a_step(policy: str = "bf16") -> tuple[TrainStep, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    batch = torch.randn(16, 8), torch.randint(0, 4, (16,))
    return TrainStep(model, optimizer, policy=policy), batch


def test_without_a_profiler_the_label_for_one_is_left_out(monkeypatch):
    step, batch = a_step()
    step(classify, batch)
    before = step.model.weight.detach().clone()

    def label(*_):
        raise AssertionError("a label was made")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", label)
    step(classify, batch)
    assert not torch.equal(step.model.weight, before)


def test_a_profiler_sees_the_step_by_its_name():
    step, batch = a_step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(classify, batch)
    assert "Optimizer.step#AdamW.step" in {each.name for each in seen.events()}


def test_a_hook_after_the_step_is_called():
    step, batch = a_step()
    called: list[str] = []
    step.optimizer.register_step_post_hook(lambda *_: called.append("own"))
    step(classify, batch)
    handle = register_optimizer_step_post_hook(lambda *_: called.append("everybody's"))
    try:
        step(classify, batch)
    finally:
        handle.remove()
    assert sorted(called) == ["everybody's", "own", "own"]


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_step_that_somebody_wrapped_is_called_as_it_is(where, monkeypatch):
    step, batch = a_step()
    called: list[str] = []
    own = step.optimizer.step if where == "instance" else type(step.optimizer).step

    @functools.wraps(own)
    def wrapped(*args, **kwargs):
        called.append(where)
        return own(*args, **kwargs)

    target = step.optimizer if where == "instance" else type(step.optimizer)
    monkeypatch.setattr(target, "step", wrapped)
    step(classify, batch)
    assert called == [where]


def test_a_scheduler_that_counts_steps_sees_them(recwarn):
    step, batch = a_step()
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1)
    step(classify, batch)
    schedule.step()
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_parameters_are_the_same_with_and_without_the_label(policy):
    weights: list[torch.Tensor] = []
    for hooked in (False, True):
        step, batch = a_step(policy)
        if hooked:
            step.optimizer.register_step_post_hook(lambda *_: None)
        for _ in range(5):
            step(classify, batch)
        weights.append(step.model.weight.detach().clone())
    assert torch.equal(*weights)
