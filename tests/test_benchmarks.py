"""What the benchmarks of diagnoses time is a step that runs."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ampwise import TrainStep

BENCHMARKS = str(Path(__file__).parent.parent / "benchmarks")
sys.path.insert(0, BENCHMARKS)
from _replays import rehearsed  # noqa: E402

sys.path.remove(BENCHMARKS)


def stepper() -> TrainStep:
    model = nn.Linear(4, 2)
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")


def test_a_rehearsed_step_goes_forward_and_backward() -> None:
    again, stash = rehearsed(stepper(), lambda model, x: model(x).sum(), torch.ones(3, 4))
    replayed = again.replay(stash)
    assert len(replayed.losses) == 1
    assert replayed.gradients["weight"].tolist() == [[3.0] * 4] * 2


def test_a_step_that_raises_is_not_timed() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        rehearsed(stepper(), lambda model, x: model(x, mask=None).sum(), torch.ones(3, 4))
