"""A step in plain float32, outside of autocast: what ran there before runs there with a patch.

A cast to 16 bits may rely on autocast to meet float32 weights. Where a patch makes the weights
float32 and leaves the cast, training in the precision of the fault goes on, and plain float32
raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ampwise.bench.arm import Arm
from ampwise.data import to_device
from ampwise.errors import kind_and_words
from ampwise.numerics.remedy import handover
from ampwise.policy import Policy
from ampwise.step.recorder import finite
from ampwise.tasks import Task
from ampwise.tasks.checks import endless


def note(folder: Path, task: Task, content: Mapping[str, Any]) -> None:
    """Note in a folder whether the source on disk runs in plain float32."""
    if not _wrong(task, content):
        _file(folder).touch()


def broken(folder: Path, task: Task, content: Mapping[str, Any]) -> str:
    """Why a source does not run in plain float32 where that on disk does; empty if it does."""
    wrong = _wrong(task, content) if _file(folder).exists() else ""
    return f"in plain float32, without autocast, it {wrong}, and did not before" if wrong else ""


def _wrong(task: Task, content: Mapping[str, Any]) -> str:
    """What is wrong with the first step of a task in plain float32."""
    settings = handover.run_settings(content)
    try:
        arm = Arm(task, Policy.parse("fp32"), settings)
        for batch in islice(endless(task), settings.accumulate):
            loss = arm.iteration(arm.step, to_device(batch, arm.step.device))
            if not finite(loss):
                return "has a loss that is not finite"
    except Exception as error:  # noqa: BLE001 - whatever the source does
        return f"raises {kind_and_words(error)}"
    return ""


def _file(folder: Path) -> Path:
    return folder / "plain-float32"
