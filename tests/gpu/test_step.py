"""Invariant 5 on a GPU: no host sync in a whole step, and the step as one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from ampwise.step import TrainStep
from tests.step.helpers import batches, classify, mlp, parameters

pytestmark = pytest.mark.gpu

PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "bf16-master"]


def on_gpu(count: int, bad: tuple[int, ...] = ()):
    made = [(x.cuda(), y.cuda()) for x, y in batches(count)]
    for index in bad:
        made[index][0].fill_(float("inf"))
    return made


def step_with(precision: str, **options) -> TrainStep:
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2), fused=True, capturable=True
    )
    return TrainStep(model, optimizer, policy=precision, max_grad_norm=1.0, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_whole_step_never_waits_for_the_device(precision, accumulate):
    step = step_with(precision, accumulate=accumulate)
    data = on_gpu(20, bad=(7,))
    for batch in data[:4]:
        step(classify, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[4:]:
            step(classify, batch)
            step.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.history[-1].skipped_total == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_captured_step_is_the_step(precision):
    """Bit for bit, skipped steps included, and the record of every step."""
    data = on_gpu(30, bad=(1, 12))
    ordinary, graphed = step_with(precision), step_with(precision)
    captured = graphed.captured(classify)
    for batch in data:
        assert torch.equal(ordinary(classify, batch), captured(batch)) or batch[0].isinf().any()
    assert torch.equal(parameters(ordinary.model), parameters(graphed.model))
    assert repr(ordinary.history) == repr(graphed.history)  # as text, since NaN is not NaN
    assert [record.skipped for record in graphed.history].count(True) == 2


def test_a_captured_scheduler_moves_the_rate_and_holds_on_skips():
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2), fused=True, capturable=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    step = TrainStep(model, optimizer, policy="fp16", scheduler=scheduler)
    captured = step.captured(classify)
    for batch in on_gpu(10, bad=(6,)):
        captured(batch)
    assert scheduler.last_epoch == 9


def test_gradients_near_the_end_of_float32_are_no_reason_to_skip():
    model = torch.nn.Linear(8, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, policy="fp32", max_grad_norm=1.0)
    step(lambda m, x: m(x).sum() * 1e25, torch.ones(2, 8, device="cuda"))
    (record,) = step.history
    assert not record.found_inf
    assert record.grad_norm == pytest.approx(1e25 * 2 * 36**0.5, rel=1e-3)


def test_batchnorm_statistics_survive_a_skipped_step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = TrainStep(model, optimizer, policy="fp16")
    step(lambda m, x: m(x).float().square().mean(), torch.randn(16, 8, device="cuda"))
    before = model[1].running_mean.clone()
    step(
        lambda m, x: m(x).float().square().mean(), torch.full((16, 8), float("nan"), device="cuda")
    )
    assert torch.equal(before, model[1].running_mean)
    assert step.history[-1].skipped
