"""``ampwise.diagnose`` on several ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ampwise
from ampwise import Task
from ampwise.bench.arm import Settings
from ampwise.errors import TaskError
from ampwise.numerics.diagnose import DiagnoseConfig, explore
from ampwise.numerics.progress import Silent
from ampwise.policy import PRESETS
from tests.distributed.commands import Command
from tests.distributed.ranks import Ranks

SHUFFLES: dict[str, Any] = {"python": random.shuffle, "numpy": np.random.shuffle}


def _seen(generator: str) -> list[int]:
    """Batches that a rank's steps were made on, of a task that shuffles by itself."""
    seen: list[int] = []

    def batches() -> list[Tensor]:
        ids = list(range(16))
        SHUFFLES[generator](ids)
        return [torch.full((2, 4), float(each)) for each in ids]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(int(batch[0, 0]))
        return model(batch).square().mean()

    ampwise.diagnose(Task(lambda: nn.Linear(4, 1), batches, loss), "fp32", steps=8)
    return list(dict.fromkeys(seen))[:8]  # one halfway and the last one are replayed


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_a_task_that_shuffles_by_itself_is_dealt_out_whole(ranks: Ranks, generator: str) -> None:
    first, second = ranks(_seen, generator)
    assert sorted(first + second) == list(range(16))


def _loss_of_a_ragged_epoch() -> float:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (0 * model(batch) + batch).mean()

    data = [torch.full((2, 4), value) for value in (0.0, 3.0, 6.0)]
    task = Task(lambda: nn.Linear(4, 4), lambda: data, loss)
    settings = Settings(torch.device("cpu"), accumulate=2)
    arm = explore(task, DiagnoseConfig(PRESETS["fp32"], settings, steps=1), Silent()).arm
    return arm.step.history[0].loss


def test_a_batch_that_fills_the_last_turn_counts_nothing(ranks: Ranks) -> None:
    assert ranks(_loss_of_a_ragged_epoch) == [pytest.approx(3.0)] * 2


def _of_no_batches(loaded: bool) -> str:
    data: Any = DataLoader([]) if loaded else []
    with pytest.raises(TaskError) as caught:
        ampwise.diagnose(Task(lambda: nn.Linear(4, 4), lambda: data, lambda *_: torch.ones(())))
    return str(caught.value)


@pytest.mark.parametrize("loaded", [True, False])
def test_an_epoch_without_a_batch_is_an_error(ranks: Ranks, loaded: bool) -> None:
    assert ["gave no batch" in each for each in ranks(_of_no_batches, loaded)] == [True, True]


def _gathers(steps: int, at: int | None) -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mine = model(batch * (1e6 if batch[0, 0] == at else 1))
        everyones = torch.cat(list(dist.nn.functional.all_gather(mine)))
        return (mine @ everyones.T).float().mean() / 1000

    data = [torch.full((2, 4), float(value)) for value in range(10)]
    found = ampwise.diagnose(Task(lambda: nn.Linear(4, 4), lambda: data, loss), steps=steps)
    return found.status, found.rank, found.cause, found.step


@pytest.mark.parametrize(
    ("steps", "at", "expected"),
    [(3, 5, ("fault", 1, "RANGE_OVERFLOW", 3)), (2, None, ("clean", None, None, 2))],
)
def test_a_loss_that_gathers_over_ranks(
    ranks: Ranks, steps: int, at: int | None, expected: tuple[Any, ...]
) -> None:
    assert ranks(_gathers, steps, at) == [expected] * 2


FAILS = """
import time, torch, torch.distributed as dist
from ampwise import Task

def hang():
    while True:
        time.sleep(1)

def raise_():
    raise ValueError("the image is broken")

def check(loss):
    if not loss.isfinite():
        raise ValueError("the loss is not finite")

def task(how: str, bad: str = "1"):
    data = [torch.full((2, 8), float(each // 2 == 2)) for each in range(16)]  # the third turn

    def loss(model, batch):
        if batch[0, 0] and str(dist.get_rank()) in bad:
            if how == "hang":
                hang()
            if how == "raise":
                raise_()
            batch = batch * 1e6
        found = model(batch).float().square().mean() / 1000
        check(found)
        return found

    return Task(lambda: torch.nn.Linear(8, 1), lambda: list(data), loss, name="fails")
"""


def _failed(folder: Path, *arguments: str) -> tuple[str, str]:
    (folder / "fails.py").write_text(FAILS)
    command = Command(folder, "diagnose", "fails.py", "--out", "run", *arguments)
    assert any(command.finish())
    return command.out, command.err


@pytest.mark.slow
def test_an_error_on_one_rank_is_its_own_and_named_by_the_others(tmp_path: Path) -> None:
    _, err = _failed(tmp_path, "--set", "how=raise")
    assert err.count('raise ValueError("the image is broken")') == 1, err
    assert "ampwise: error: rank 1: the task's loss() raised ValueError" in err
    assert "ampwise: error: rank 1 at step 3 failed: ValueError: the image is broken" in err


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    _, err = _failed(tmp_path, "--set", "how=hang", "--rank-timeout", "6")
    said = [line for line in err.splitlines() if "rank 1 " in line and "fails.py" in line]
    assert said, err
    assert "time.sleep(1)" in said[0]


@pytest.mark.parametrize("bad", [pytest.param("1", marks=pytest.mark.slow), "01"])
def test_a_check_that_raises_in_half_precision_only(tmp_path: Path, bad: str) -> None:
    """Alike on all ranks it is diagnosed; on one, its error says what the diagnosis would."""
    _, err = _failed(tmp_path, "--set", "how=overflow", "--set", f"bad={bad}")
    if bad == "01":
        found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
        assert (found["cause"], found["rank"]) == ("RANGE_OVERFLOW", 0)
        return
    assert "ampwise: error: rank 1: the task's loss() raised ValueError" in err
    assert "float16 ends at 65,504" in err
