"""Diagnosis on CUDA: the recorder costs no host sync, replays are exact, origins are found."""

from __future__ import annotations

import pytest
import torch

from ampwise import TrainStep, diagnose
from ampwise.step import LossScale
from tests.numerics.cases import CASES, line_of
from tests.numerics.test_on_fault import Net, data, mean_square

pytestmark = pytest.mark.gpu


def test_an_armed_recorder_costs_no_host_sync():
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TrainStep(model, optimizer, policy="fp16", loss_scale=LossScale(64.0),
                     on_fault=lambda _: None)  # fmt: skip
    batch = data(6, 8).cuda()
    for _ in range(3):
        step(mean_square, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(mean_square, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_fault_is_examined_one_step_later_with_nothing_changed():
    torch.manual_seed(0)
    model, told = Net().cuda(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TrainStep(model, optimizer, policy="fp16", loss_scale=LossScale(64.0),
                     on_fault=told.append)  # fmt: skip
    for index in range(4):
        batch = data(6, 8, seed=index).cuda()
        step(mean_square, batch * 1e6 if index == 1 else batch)
    assert [(each.step, each.cause) for each in told] == [(2, "RANGE_OVERFLOW")]


@pytest.mark.parametrize("name", ["t5 feed-forward", "scores before scaling", "length of zero"])
def test_public_cases_on_the_device(name):
    torch.manual_seed(0)
    case = CASES[name]
    found = diagnose(case.make(), case.precision, device="cuda", steps=6)
    assert (found.status, found.cause) == (case.status, case.cause)
    assert found.origin is not None
    assert found.origin.line == line_of(case.line_of)
