"""Accelerate's loop with `TrainStep`: what it prepares is taken, and a precision is set once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from ampwise import TrainStep, UsageError

from ..step.helpers import batches, classify, mlp

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def prepared():
    """Makes an Accelerator, and prepares a model, an optimizer, a loader and a schedule."""
    from accelerate.state import AcceleratorState

    def prepare(mixed_precision: str) -> tuple[Any, ...]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loader = DataLoader(batches(8), batch_size=None)
        return accelerator.prepare(model, optimizer, loader, StepLR(optimizer, 1, gamma=0.9))

    yield prepare
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-master"])
def test_what_it_prepares_trains_as_without_it(prepared, policy):
    model, optimizer, loader, schedule = prepared("no")
    step = TrainStep(
        model, optimizer, policy=policy, accumulate=2, max_grad_norm=1.0, scheduler=schedule
    )
    for batch in loader:
        step(classify, batch)

    alone = mlp()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2, fused=True)
    other = TrainStep(
        alone, plain, policy=policy, accumulate=2, max_grad_norm=1.0,
        scheduler=StepLR(plain, 1, gamma=0.9),
    )  # fmt: skip
    for batch in batches(8):
        other(classify, batch)
    assert [each.lr for each in step.history] == [each.lr for each in other.history]
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_two_precisions_are_refused_in_a_line(prepared, policy):
    model, optimizer, *_ = prepared("bf16")
    with pytest.raises(UsageError, match=r'Accelerate has prepared it .*"bf16"') as refusal:
        TrainStep(model, optimizer, policy=policy)
    assert 'mixed_precision="no"' in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_same_precision_twice_is_warned_of(prepared):
    model, optimizer, *_ = prepared("bf16")
    with pytest.warns(UserWarning, match="the policy bf16 does the same again"):
        TrainStep(model, optimizer, policy="bf16")


def test_two_scalers_are_refused(prepared):
    model, optimizer, *_ = prepared("bf16")
    optimizer.scaler = torch.amp.GradScaler("cpu")  # as on CUDA with fp16
    with pytest.raises(UsageError, match="and scales its loss"):
        TrainStep(model, optimizer, policy="bf16")


def test_a_model_that_it_has_not_prepared_is_not_its_business(prepared, recwarn):
    prepared("bf16")
    model = mlp()
    TrainStep(model, torch.optim.SGD(model.parameters()), policy="fp32")
    assert not recwarn.list
