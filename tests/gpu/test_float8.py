"""`fp8` on a GPU that multiplies float8: the same numbers as emulated, and no host sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.capability import multiplies_float8
from ampwise.policy import RECIPES
from ampwise.step.precision import float8

pytest.importorskip("torchao", reason="needs ampwise[fp8]")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _has_a_unit() -> None:
    if not multiplies_float8(torch.device("cuda")):
        pytest.skip("this GPU has no unit for float8")


def step_with(recipe: str) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.cuda().parameters(), fused=True)
    return TrainStep(model, optimizer, policy=f"fp8:recipe={recipe}", max_grad_norm=1.0)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=source)
    return x.cuda(), x[:, :5].argmax(dim=1).cuda()


def loss(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]).float(), data[1])


@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_that_are_emulated(
    recipe: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the order of sums, and results that are bfloat16 before their scale is applied."""
    found: dict[bool, Tensor] = {}
    for native in (True, False):
        monkeypatch.setattr(float8, "multiplies_float8", lambda _, native=native: native)
        step = step_with(recipe)
        with step.autocast():
            value = loss(step.model, batch(rows))
        step.backward(value)
        held = [each.grad for each in step.model.parameters() if each.grad is not None]
        found[native] = torch.cat([each.flatten() for each in held])
    assert (found[True] - found[False]).norm() < 0.02 * found[False].norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_step_never_waits_for_the_device(recipe: str) -> None:
    step, data = step_with(recipe), batch(64)
    for _ in range(4):
        step(loss, data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            step(loss, data)
            step.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.history[-1].skipped_total == 0
