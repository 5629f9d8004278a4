"""Buffers that a model rounds when it is made: what they were before.

A decay of 0.999 that is kept in bfloat16 is 1, and a replay finds it so. Where a model has buffers,
or other tensors, in 16 bits, it is built once more beside a shadow, which says what they would be
without rounding, and on which line they were rounded. Replays take that for their value, as long as
nobody has written to them since. Parameters are what the run trains: they are exact.
"""

from __future__ import annotations

import torch

from ampwise.bench.arm import Arm, Settings
from ampwise.errors import TaskError
from ampwise.numerics.observe.constants import ORIGINALS, Original, in_16_bits
from ampwise.numerics.observe.shadow import Shadow
from ampwise.places import NOWHERE, placing
from ampwise.step.modules import as_one
from ampwise.step.recorder import RandomState
from ampwise.tasks import Task
from ampwise.tasks.checks import build

_NEVER = "", NOWHERE, 0
"""An operation that is not met: all of them are remembered until it is."""


def note_originals(task: Task, arm: Arm, settings: Settings) -> None:
    """Note what the 16-bit buffers of an arm's model, just made, were before they were rounded."""
    mine = dict(in_16_bits(arm.model))
    if not mine:
        return
    state = RandomState.now(settings.device)
    with placing([]) as places:
        shadow = Shadow(places, errors=False, at=_NEVER)
        try:
            with shadow.beside():
                model, _ = build(task, settings.device, settings.seed)
        except TaskError:  # it cannot be built twice
            return
        finally:
            state.restore(settings.device)
    for name, tensor in in_16_bits(as_one(model)):
        ideal, maker = shadow.of(tensor), shadow.maker_of(tensor)
        same = name in mine and torch.equal(mine[name], tensor)
        if same and ideal is not None and maker is not None:
            ORIGINALS[mine[name]] = Original(tensor.clone(), ideal.clone(), maker)
