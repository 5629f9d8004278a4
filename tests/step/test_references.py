"""50 steps against a loop written by hand with torch.amp: bit for bit, or within a reasoned bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.step import TrainStep

from .helpers import OPTIMIZERS, batches, classify, mlp, parameters

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list,
    dtype: torch.dtype | None,
    accumulate: int = 1,
    max_norm: float | None = None,
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, growth_interval=10)
    for index, batch in enumerate(data):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = classify(model, batch)
        scaler.scale(loss / accumulate).backward()
        if (index + 1) % accumulate:
            continue
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_ampwise(model, optimizer, data, precision, accumulate=1, max_norm=None) -> TrainStep:
    from ampwise.step import LossScale

    step = TrainStep(
        model,
        optimizer,
        policy=precision,
        accumulate=accumulate,
        max_grad_norm=max_norm,
        loss_scale=LossScale(growth_interval=10),
    )
    for batch in data:
        step(classify, batch)
    return step


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", DTYPES)
def test_parameters_after_50_steps_equal_the_handwritten_loop_bit_for_bit(
    precision, optimizer, accumulate
):
    data = batches(50 * accumulate)
    hand, ours = mlp(), mlp()
    by_hand(hand, OPTIMIZERS[optimizer](hand.parameters()), data, DTYPES[precision], accumulate)
    step = by_ampwise(ours, OPTIMIZERS[optimizer](ours.parameters()), data, precision, accumulate)
    assert step.steps == 50
    assert torch.equal(parameters(hand), parameters(ours))


# On an accelerator the norm is summed in float64, more exactly than clip_grad_norm_ does.
@pytest.mark.parametrize("decided_on", ["host"], indirect=True)
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-plain", "sgd-plain"])
@pytest.mark.parametrize("precision", DTYPES)
def test_clipping_on_the_general_path_is_bit_for_bit_too(precision, optimizer):
    """Unscaling by a power of two is exact, so one multiplication equals two."""
    data = batches(50)
    hand, ours = mlp(), mlp()
    by_hand(hand, OPTIMIZERS[optimizer](hand.parameters()), data, DTYPES[precision], max_norm=0.3)
    by_ampwise(ours, OPTIMIZERS[optimizer](ours.parameters()), data, precision, max_norm=0.3)
    assert torch.equal(parameters(hand), parameters(ours))


@pytest.mark.parametrize("precision", DTYPES)
def test_folded_clipping_moves_a_gradient_by_at_most_2_ulp(precision):
    """g / fl(s / c) instead of fl(g / s) * c: three roundings against two, half an ULP each.

    Seen through plain SGD with lr 1, where the update is the clipped gradient itself.
    """
    (batch,) = batches(1)
    hand, ours = mlp(), mlp()
    for each in (*hand.parameters(), *ours.parameters()):
        each.data.zero_()  # so that "parameter minus update" rounds nothing away
        each.data += 0.0
    hand[2].bias.data += torch.tensor([1.0, 0.0, 0.0, 0.0])
    ours[2].bias.data += torch.tensor([1.0, 0.0, 0.0, 0.0])
    before = parameters(hand).clone()
    sgd = {"lr": 1.0, "fused": True}
    by_hand(hand, torch.optim.SGD(hand.parameters(), **sgd), [batch], DTYPES[precision], 1, 0.01)
    by_ampwise(ours, torch.optim.SGD(ours.parameters(), **sgd), [batch], precision, 1, 0.01)
    theirs, mine = parameters(hand) - before, parameters(ours) - before
    assert theirs.norm().item() == pytest.approx(0.01, rel=1e-3)  # it did clip
    moved = theirs != 0
    bound = 2 * 2.0**-23 * theirs.abs()
    near_one = 2.0**-23 * (before != 0)  # where 1.0 - update rounds
    assert torch.all((theirs - mine).abs()[moved] <= (bound + near_one)[moved])


def test_fp16_overflow_skips_where_the_handwritten_loop_skips():
    data = batches(30)
    for index in (3, 4, 17):
        data[index] = (data[index][0] * 1e5, data[index][1])
    hand, ours = mlp(), mlp()
    by_hand(hand, OPTIMIZERS["adamw-fused"](hand.parameters()), data, torch.float16)
    step = by_ampwise(ours, OPTIMIZERS["adamw-fused"](ours.parameters()), data, "fp16")
    assert [record.step for record in step.history if record.skipped] == [4, 5, 18]
    assert torch.equal(parameters(hand), parameters(ours))
