"""Invariant 4, for what forward writes: BatchNorm statistics and other buffers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.step import TrainStep


class Counting(nn.Module):
    """A buffer that forward writes, and one that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0), 0.1)
        return x * self.mask


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), Counting(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def loss_of(model, x):
    return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))


def buffers(model) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.named_buffers()}


def equal(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skipped_step_leaves_buffers_as_they_were(precision, fused, accumulate):
    model = network()
    adam = torch.optim.AdamW(model.parameters(), fused=fused)
    step = TrainStep(model, adam, policy=precision, accumulate=accumulate)
    good = torch.randn(16, 8)
    bad = good.clone()
    bad[3, 2] = float("inf")
    for _ in range(2 * accumulate):
        step(loss_of, good)
    before = buffers(model)
    for index in range(accumulate):
        step(loss_of, bad if index == 0 else good)
    assert step.history[-1].skipped
    assert equal(before, buffers(model))
    for _ in range(accumulate):
        step(loss_of, good)
    after = buffers(model)
    assert not torch.equal(before["2.running_mean"], after["2.running_mean"])
    assert not torch.equal(before["1.mean"], after["1.mean"])


def test_the_very_first_window_is_covered_too():
    model = network()
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy="fp16")
    before = buffers(model)
    step(loss_of, torch.full((16, 8), float("nan")))
    assert equal(before, buffers(model))


def test_evaluation_writes_nothing_back():
    """Statistics copied before a window must not undo what happened outside of it."""
    model = network()
    step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    step(loss_of, torch.randn(16, 8))
    with torch.no_grad(), step.autocast():
        model(torch.randn(16, 8))
    expected = buffers(model)
    step(loss_of, torch.full((16, 8), float("nan")))
    assert equal(expected, buffers(model))


def test_buffers_that_are_only_read_are_not_copied_after_the_first_window():
    model = network()
    step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        step(loss_of, torch.randn(16, 8))
    step._open.buffers.before(begins=True)
    copied = {id(each.tensor) for each in step._open.buffers._window.kept if each.copy is not None}
    assert id(model[1].mask) not in copied
    assert {id(model[1].mean), id(model[2].running_var)} <= copied
