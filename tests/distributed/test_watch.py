"""Ranks that no longer train one model, and a rank that keeps the others waiting (two processes)."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampwise import TrainStep
from ampwise.distributed import watch
from ampwise.distributed.checksum import checksum
from ampwise.distributed.differences import Row, compare, slowest
from ampwise.distributed.words import spell
from ampwise.errors import DivergedRanksError, UsageError
from ampwise.step import LossScale
from tests.distributed import small
from tests.distributed.ranks import Ranks


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def network(spread: str) -> nn.Module:
    """Of `small.network`; ``hsdp`` has copies of all of it, ``parts`` has none."""
    if spread not in ("hsdp", "parts"):
        return small.network(spread)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, 1) if spread == "hsdp" else (1, 2)
    model = small.network()
    return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


# -- ranks that differ -----------------------------------------------------------------------------


def _parameter(model: nn.Module, _step: TrainStep) -> None:
    bias = list(model.parameters())[-1]
    held: Tensor = getattr(bias, "_local_tensor", bias).data
    held.view(torch.int32)[-1] ^= 1  # the last bit of the last of 3 elements


def _scale(_model: nn.Module, step: TrainStep) -> None:
    step.loss_scale.scale *= 2


def _tracker(_model: nn.Module, step: TrainStep) -> None:
    step.loss_scale._growth_tracker += 1


def _steps(_model: nn.Module, step: TrainStep) -> None:
    step._log.steps += 1


def _differ(spread: str, change: Any, options: dict[str, Any]) -> tuple[int, str, tuple[int, ...]]:
    model = network(spread)
    step = TrainStep(model, adamw(model), watch_every=5, **options)
    try:
        for index, batch in enumerate(small.batches(40)[small.me() :: 2]):
            if index == 7 and small.me() == 1:
                change(model, step)
            step(small.loss, batch)
    except DivergedRanksError as error:
        return index + 1, str(error), error.ranks
    return 0, "", ()


@pytest.mark.parametrize(
    ("spread", "change", "what"),
    [
        ("ddp", _parameter, "the parameters"),
        ("hsdp", _parameter, "their copies of the same parameters"),
        ("ddp", _scale, "the loss scale (rank 0: 65536.0; rank 1: 131072.0)"),
        ("fsdp", _scale, "the loss scale (rank 0: 65536.0; rank 1: 131072.0)"),
        ("fsdp", _tracker, "the growth tracker (rank 0: 10; rank 1: 11)"),
        ("ddp", _steps, "the number of steps (rank 0: 10; rank 1: 11)"),
    ],
)
def test_a_difference_ends_all_ranks_with_one_message(
    ranks: Ranks, spread: str, change: Any, what: str
) -> None:
    first, second = ranks(_differ, spread, change, {"policy": "fp16"})
    assert first == second
    step, message, who = first
    assert step == 10
    assert who == (0, 1)
    assert message.startswith(f"ranks 0 and 1 differ in {what}")
    assert "between step 5 and step 1" in message
    assert "checkpoint of step 5 or earlier" in message
    assert "\n" not in message


def _same_all_along(spread: str, policy: str) -> tuple[int, bool]:
    model = network(spread)
    scale = LossScale(growth_interval=3)
    step = TrainStep(model, adamw(model), policy=policy, watch_every=2, loss_scale=scale)
    for index, (inputs, labels) in enumerate(small.batches(60)[small.me() :: 2]):
        step(small.loss, (inputs / 0 if index % 7 == 3 else inputs, labels))
    return step.steps, step.history[-1].skipped_total >= 4


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.parametrize("spread", ["ddp", "fsdp", "hsdp", "parts"])
def test_ranks_that_are_the_same_are_left_alone(ranks: Ranks, spread: str, policy: str) -> None:
    assert ranks(_same_all_along, spread, policy) == [(30, True)] * 2


def _own_on_purpose() -> int:
    """A parameter that DDP was told to leave alone, and a model outside of DDP."""
    model, own = small.network(), small.network(seed=small.me())
    model[0].own = nn.Parameter(torch.full((3,), float(small.me())))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.own"])
    spread = DistributedDataParallel(model)
    optimizers = [adamw(spread), adamw(own)]
    step = TrainStep([spread, own], optimizers, policy="fp32", watch_every=1)
    for batch in small.batches(3):
        step(lambda models, b: small.loss(models[0], b) + small.loss(models[1], b), batch)
    return step.steps


def test_parameters_that_differ_on_purpose_are_left_out(ranks: Ranks) -> None:
    assert ranks(_own_on_purpose) == [3, 3]


def _gathers(every: int) -> int:
    count, original = 0, dist.all_gather

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    model = network("ddp")
    step = TrainStep(model, adamw(model), policy="fp32", watch_every=every, accumulate=2)
    watch.dist.all_gather = counting
    try:
        for batch in small.batches(40):
            step(small.loss, batch)
    finally:
        watch.dist.all_gather = original
    return count


@pytest.mark.parametrize(("every", "count"), [(0, 0), (5, 5), (50, 1)])
def test_one_gather_after_the_first_step_and_every_n(ranks: Ranks, every: int, count: int) -> None:
    assert ranks(_gathers, every) == [count, count]


def test_a_negative_interval_is_refused() -> None:
    model = small.network()
    with pytest.raises(
        UsageError, match="watch_every: expected a whole number of steps, 0 or more, got -1"
    ):
        TrainStep(model, adamw(model), policy="fp32", watch_every=-1)


# -- who is it -------------------------------------------------------------------------------------


def row(rank: int, **values: int) -> Row:
    numbers = dict.fromkeys(Row.__slots__, 0) | {"rank": rank, "steps": 100} | values
    return Row(**numbers)


def test_with_a_majority_only_the_odd_ones_are_named() -> None:
    rows = [row(rank, checksum=-1 if rank == 5 else 7) for rank in range(8)]
    with pytest.raises(DivergedRanksError) as caught:
        compare(rows, 50)
    assert caught.value.ranks == (5,)
    assert str(caught.value).startswith(
        "rank 5 differs in the parameters (ranks 0-4, 6, 7: checksum 0000000000000007; "
        "rank 5: checksum ffffffffffffffff): it happened between step 50 and step 100"
    )
    assert "if only rank 5 does so again, suspect its machine" in str(caught.value)


def test_parts_are_compared_among_those_who_hold_the_same_one() -> None:
    parts = [row(rank, key=rank % 2, part_checksum=rank % 2) for rank in range(6)]
    compare(parts, None)
    parts[3] = row(3, key=1, part_checksum=9)
    with pytest.raises(DivergedRanksError, match="rank 3 differs in their copies") as caught:
        compare(parts, None)
    assert "by step 100" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_ranks_are_spelled_as_people_do() -> None:
    assert spell([3]) == "rank 3"
    assert spell([1, 0]) == "ranks 0 and 1"
    assert spell([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"


# -- checksum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 33])
def test_checksum_sees_every_bit_in_any_layout(dtype: torch.dtype, count: int) -> None:
    source = torch.Generator().manual_seed(count)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = torch.randint(-100, 100, (count,), generator=source).to(integer)
    tensor = bits.view(dtype)
    found = int(checksum(tensor))
    moved = torch.cat((bits[:1], bits)).view(dtype)[
        min(1, count) :
    ]  # starts in the middle of a word
    assert int(checksum(moved)) == found
    for index in range(count):
        changed = bits.clone()
        changed[index] ^= 1
        assert int(checksum(changed.view(dtype))) != found


def test_checksum_of_a_tensor_in_another_memory_format() -> None:
    tensor = torch.randn(4, 3, 5, 5)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == checksum(tensor)
    assert checksum(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == checksum(tensor)


# -- slow ranks ------------------------------------------------------------------------------------


class _WithBuffers(nn.Module):
    """DDP broadcasts its running statistics at the start of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(small.FEATURES), small.network())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def _slow(spread: str, where: str, seconds: float) -> tuple[str | None, list[str]]:
    model = DistributedDataParallel(_WithBuffers()) if spread == "buffers" else network(spread)
    step = TrainStep(model, adamw(model), policy="fp32", watch_every=6, accumulate=2)
    late = seconds if small.me() == 1 else 0.0

    def loss(model: Any, batch: Any) -> Tensor:
        if where == "forward":
            time.sleep(late)
        return small.loss(model, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in small.batches(2 * 30):
            time.sleep(0.003 + (late if where == "data" else 0.0))
            step(loss, batch)
    return step.slow_rank, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("spread", "where"),
    [
        ("ddp", "data"),
        ("ddp", "forward"),
        ("buffers", "data"),
        ("buffers", "forward"),
        ("fsdp", "data"),
    ],
)
def test_a_slow_rank_is_named_once(ranks: Ranks, spread: str, where: str) -> None:
    (first, warned), (second, silent) = ranks(_slow, spread, where, 0.015)
    assert first == second
    assert first is not None
    assert first.startswith("rank 1 is slow: ")
    assert {"data": "where data is loaded", "forward": "in forward"}[where] in first
    assert warned == [first]
    assert silent == []


def test_equal_ranks_are_not_slow(ranks: Ranks) -> None:
    assert ranks(_slow, "ddp", "data", 0.0) == [(None, [])] * 2


def timed(rank: int, data_ms: float, forward_ms: float, step_ms: float = 100) -> Row:
    return row(
        rank,
        data_us=round(data_ms * 1e3),
        forward_us=round(forward_ms * 1e3),
        step_us=round(step_ms * 1e3),
    )


def test_waiting_in_forward_is_not_being_slow() -> None:
    rows = [timed(0, 1, 49), timed(1, 40, 10), timed(2, 1, 49)]
    found = slowest(rows, forward_waits=True)
    assert found is not None
    assert (found.rank, found.where) == (1, "data")
    assert (found.busy_ms, found.others_ms, found.share) == (50, 11, 0.39)
    assert slowest(rows, forward_waits=False) is None


def test_a_difference_that_hardly_lengthens_the_step_is_not_mentioned() -> None:
    assert slowest([timed(0, 1, 1), timed(1, 4, 1)], forward_waits=False) is None
    assert slowest([timed(0, 1, 1), timed(1, 9, 1)], forward_waits=False) is not None
