"""Faults on one rank, with real processes: NaN data, an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.step import LossScale
from tests.distributed import small
from tests.distributed.ranks import Ranks
from tests.distributed.small import Spread


class Squares(nn.Module):
    """Overflows float16 where inputs are above 256."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = hidden * hidden
        return self.head(hidden)


def _diagnosed(spread: Spread, kind: str, at: int) -> tuple[Any, ...]:
    model = small.spread_out(Squares(), spread)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: list[Any] = []
    step = TrainStep(
        model,
        optimizer,
        policy="fp16",
        loss_scale=LossScale(init_scale=256.0),
        on_fault=found.append,
    )
    for index, (inputs, labels) in enumerate(small.batches(3)):
        if index == 1 and small.me() == at:
            inputs = inputs / 0 if kind == "data" else inputs * 2000
        step(small.loss, (inputs, labels))
    assert [each.skipped for each in step.history] == [False, True, False]
    one = found[0]
    line = one.origin.source if one.origin else None
    return one.rank, one.cause, line, one.status, one.step, one.explanation.partition(":")[0]


@pytest.mark.parametrize("at", [0, 1])
def test_an_overflow_on_one_rank_is_named_with_its_line_on_all(ranks: Ranks, at: int) -> None:
    first, second = ranks(_diagnosed, "ddp", "overflow", at)
    assert first == second
    assert first == (
        *(at, "RANGE_OVERFLOW", "hidden = hidden * hidden", "fault", 2),
        f"On rank {at} of 2",
    )


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_bad_data_on_one_rank_is_named_on_all(ranks: Ranks, spread: Spread) -> None:
    first, second = ranks(_diagnosed, spread, "data", 1)
    assert first == second
    assert first[:2] == (1, "BAD_INPUT")


def test_under_fsdp_the_rank_and_the_phase_are_known(ranks: Ranks) -> None:
    first, second = ranks(_diagnosed, "fsdp", "overflow", 1)
    assert first == second
    assert first == (1, None, None, "fault", 2, "On rank 1 of 2")


class Wrapped(nn.Module):
    """DDP inside a module, and a loss that gets at it by a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.parallel.DistributedDataParallel(Squares())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def _where_ddp_is_not_outermost(weight: float) -> tuple[Any, ...]:
    model = Wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: list[Any] = []
    scale = LossScale(init_scale=256.0)
    step = TrainStep(model, optimizer, policy="fp16", loss_scale=scale, on_fault=found.append)
    for index, (inputs, labels) in enumerate(small.batches(3)):
        bad = index == 2 and small.me() == 1
        batch = (inputs * 2000 if bad else inputs, labels)
        step(lambda _, b: small.loss(model, b), batch, weight=weight if index else 1)
    return found[0].rank, found[0].cause, found[0].status


@pytest.mark.parametrize("weight", [1.0, 50.0])
def test_ranks_replay_by_themselves_wherever_ddp_is(ranks: Ranks, weight: float) -> None:
    for found in ranks(_where_ddp_is_not_outermost, weight):
        assert found == (1, "RANGE_OVERFLOW", "fault")


def _gathered(inputs: Tensor) -> Tensor:
    return torch.cat(list(dist.nn.functional.all_gather(inputs)))


def _contrastive(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each rank's samples against those of all, as CLIP does."""
    features = model(batch[0])
    return (features @ _gathered(features).T).float().logsumexp(1).mean()


def _contrasted(at: int | None, init_scale: float) -> tuple[Any, ...]:
    model = small.spread_out(Squares(), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: list[Any] = []
    scale = LossScale(init_scale=init_scale)
    step = TrainStep(model, optimizer, policy="fp16", loss_scale=scale, on_fault=found.append)
    for index, (inputs, labels) in enumerate(small.batches(4)):
        bad = index == 2 and small.me() == at
        step(_contrastive, (inputs * 2000 if bad else inputs, labels))
    skipped = [each.skipped for each in step.history]
    if not found:
        return (*skipped,)
    one = found[0]
    return (*skipped, one.rank, one.cause, one.origin.source, one.status, one.step)


@pytest.mark.parametrize("at", [0, 1])
def test_a_loss_that_gathers_over_ranks_is_replayed_by_all_together(ranks: Ranks, at: int) -> None:
    first, second = ranks(_contrasted, at, 16.0)
    assert first == second
    line = "hidden = hidden * hidden"
    assert first == (False, False, True, False, at, "RANGE_OVERFLOW", line, "fault", 3)


def test_a_loss_scale_that_settles_is_no_fault_of_a_loss_that_gathers(ranks: Ranks) -> None:
    first, second = ranks(_contrasted, None, 2.0**20)
    assert first == second
    assert len(first) == 4
    assert first[0]
