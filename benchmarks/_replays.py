"""A step to be replayed, as the benchmarks of diagnoses need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampwise import TrainStep
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay


def rehearsed(step: TrainStep, loss: Callable[[Any, Any], Any], batch: Any) -> tuple[Replay, Stash]:
    """A step that can be run again and again, and has been once.

    A replay keeps what the step raised: without a look at it, one that fails at once would read as
    one that takes neither time nor memory.
    """
    again = Replay(step)
    stash = again.rehearsal(lambda step, batch: step.micro_batch(loss, batch), [batch])
    if (error := again.replay(stash).error) is not None:
        raise error
    return again, stash
