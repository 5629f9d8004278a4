"""``ampwise.diagnose`` on several ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampwise
from ampwise import Task
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
    return seen[:8]  # after them the last one is replayed


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_a_task_that_shuffles_by_itself_is_dealt_out_whole(ranks: Ranks, generator: str) -> None:
    first, second = ranks(_seen, generator)
    assert sorted(first + second) == list(range(16))
