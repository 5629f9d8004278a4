"""The steps after the failing one, as float64 would make them: what patches are compared on.

A patch that is 62 dB on the step that failed may be 16 on the fourth after it. So the process that
runs the source on disk also makes the next steps of it from their float64 gradients, and writes
each down: parameters, batches, and those gradients. A trial replays them with the patched source.
That all patches are held against the same numbers is what makes them comparable; on the way that
each of them trains by itself they would not be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.bench.arm import Arm
from ampwise.data import to_device
from ampwise.numerics.observe.reference import Reference, reference
from ampwise.numerics.remedy import fix, handover
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay
from ampwise.tasks import Task
from ampwise.tasks.checks import endless

STEPS, MOST_STEPS = 5, 12
"""Next steps that are made; and where they are quick, as what a patch keeps may fall slowly."""
LIMIT_S, QUICK_S = 3.0, 0.5
"""Processor time after which no further step is added: the steps of a large model are fewer."""


def windows(task: Task, arm: Arm, stash: Stash, content: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Batches of the windows after the failing one."""
    accumulate = content["run"]["accumulate"]
    rest = endless(task)
    seen = (stash.step - 1) * accumulate + len(stash.micro_batches)
    for _ in islice(rest, seen):
        pass
    while True:
        window = list(islice(rest, accumulate))
        yield [to_device(each, arm.step.device) for each in window]


def write(folder: Path, task: Task, content: Mapping[str, Any]) -> None:
    """Make the next steps of the source on disk, as far as float64 has gradients of them."""
    arm, failing = handover.restored(task, content)
    first = handover.reference(content)
    if arm.iteration.makes_updates or not first.finite:
        return
    began = time.process_time()
    _step(arm, first.gradients, content["run"]["max_grad_norm"])
    for number, window in enumerate(islice(windows(task, arm, failing, content), MOST_STEPS)):
        step = Replay(arm.step)
        stash = step.rehearsal(arm.iteration.again, window)
        wanted = reference(step, stash)
        if not wanted.finite:
            return
        parameters = {name: each.detach() for name, each in arm.model.named_parameters()}
        made = {
            "parameters": parameters,
            "wanted": vars(wanted) | {"finite": True},
            "window": handover.window(stash, arm.step.device),
        }
        torch.save(made, _file(folder, number))
        taken_s = time.process_time() - began
        if taken_s > LIMIT_S or (taken_s > QUICK_S and number + 1 >= STEPS):
            return
        _step(arm, wanted.gradients, content["run"]["max_grad_norm"])


def kept(folder: Path, arm: Arm, scale: float, weak: Collection[str]) -> Iterator[float]:
    """SQNR of the gradients of each next step, in dB; -inf where one is not finite.

    Parameters
    ----------
    arm
        Of the source that is tried; its parameters are written to.
    scale
        Loss scale that has settled on the failing step.
    weak
        Parameters whose gradient was wrong on it, as for `fix.judged`.
    """
    for number in count():
        if not _file(folder, number).exists():
            return
        content: dict[str, Any] = torch.load(_file(folder, number), weights_only=True)
        _put(arm.model, content["parameters"])
        content["window"]["scale"] = torch.as_tensor(scale, device=arm.step.device)
        wanted: Reference = handover.reference(content)
        db = fix.kept_db(Replay(arm.step), handover.stash(arm, content["window"]), wanted, weak)
        if not math.isnan(db):
            yield db


def _file(folder: Path, number: int) -> Path:
    return folder / f"ahead-{number}.pt"


def _step(arm: Arm, gradients: Mapping[str, Tensor], limit: float | None) -> None:
    """Make a step of the optimizer from gradients that are given."""
    named = {n: each for n, each in arm.model.named_parameters() if n in gradients}
    for name, each in named.items():
        each.grad = gradients[name].to(each.dtype)
    if limit is not None:
        nn.utils.clip_grad_norm_(named.values(), limit)
    arm.optimizer.step()
    arm.optimizer.zero_grad()


@torch.no_grad()
def _put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, each in model.named_parameters():
        each.copy_(values[name])
