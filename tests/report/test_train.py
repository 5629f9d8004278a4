"""A training run in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampwise.report.train import TrainedRun
from ampwise.training.config import TrainResult


@pytest.mark.parametrize(
    ("steps", "skipped", "said"),
    [
        (1, 0, "finished: 1 step"),
        (2, 0, "finished: 2 steps"),
        (1200, 1, "finished: 1,200 steps, 1 of them skipped"),
    ],
)
def test_skipped_steps_are_said_where_there_are_some(steps, skipped, said):
    result = TrainResult("t", "fp16", Path("r"), "finished", steps, skipped_steps=skipped)
    run = TrainedRun(result)
    assert run.outcome == said
    assert ("of them skipped" in dict(run.rows)["steps"]) == bool(skipped)
