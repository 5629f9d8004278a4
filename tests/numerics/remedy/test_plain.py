"""A patch may not break plain float32, where the source on disk runs in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.numerics.remedy import plain
from ampwise.tasks import Task

RUN = {"device": "cpu", "seed": 0, "accumulate": 2, "max_grad_norm": None}


class Teacher(nn.Module):
    """A part in one format, given what is cast to another: it may only run under autocast."""

    def __init__(self, held: torch.dtype, given: torch.dtype):
        super().__init__()
        self.learns = nn.Linear(4, 4)
        self.slow = nn.Linear(4, 4).requires_grad_(False).to(held)
        self.given = given

    def forward(self, x):
        return self.learns(x) - self.slow(x.to(self.given)).detach()


def task(held: torch.dtype, given: torch.dtype, factor: float = 1.0) -> Task:
    return Task(
        model=lambda: Teacher(held, given),
        batches=lambda: [torch.ones(2, 4)] * 3,
        loss=lambda model, batch: factor * model(batch).float().square().mean(),
    )


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("patched", "wrong"),
    [
        (task(F32, F32), ""),
        (task(F32, BF16), "raises RuntimeError"),
        (task(F32, F32, float("inf")), "has a loss that is not finite"),
    ],
)
def test_what_ran_in_plain_float32_still_has_to(tmp_path, patched, wrong):
    plain.note(tmp_path, task(BF16, BF16), {"run": RUN})
    said = plain.broken(tmp_path, patched, {"run": RUN})
    assert bool(said) is bool(wrong)
    assert wrong in said


@pytest.mark.parametrize("before", [task(BF16, F32), task(F32, F32, float("nan"))])
def test_what_did_not_run_there_is_not_asked_to(tmp_path, before):
    plain.note(tmp_path, before, {"run": RUN})
    assert not plain.broken(tmp_path, task(F32, BF16), {"run": RUN})
