"""The step whose forward made a buffer inf or NaN: the task is trained again as far as that.

The step itself may be sound, and be made: it is a later one that reads the buffer, and fails.
"""

from __future__ import annotations

from dataclasses import replace

from ampwise.bench.arm import Arm
from ampwise.data import to_device
from ampwise.numerics.updates.of_task import Trained
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay, finite_buffers, poisoned
from ampwise.tasks.checks import endless


def spoiling_step(trained: Trained) -> tuple[Arm, Stash] | None:
    """The first step, before it is made, whose forward leaves a buffer that is not finite.

    Parameters
    ----------
    trained
        As far as this step it is looked for.
    """
    number = _first(trained)
    if number is None:
        return None
    arm, batches = replace(trained, steps=number).arm()
    window = [next(batches) for _ in range(trained.settings.accumulate)]
    return arm, Replay(arm.step).rehearsal(arm.iteration.again, window)


def _first(trained: Trained) -> int | None:
    arm = Arm(trained.task, trained.policy, trained.settings)
    models = Replay(arm.step).models
    good = finite_buffers(models)
    for batch in endless(trained.task):
        arm.iteration(arm.step, to_device(batch, arm.step.device))
        if poisoned(models, good):
            return arm.step.steps + (not arm.step.boundary)
        good = finite_buffers(models)
        if arm.step.steps >= trained.steps:
            return None
    return None
