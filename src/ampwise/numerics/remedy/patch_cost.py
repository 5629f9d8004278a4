"""What a patch costs: its step beside that of the source on disk, in turns in one process."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from ampwise.errors import kind_and_words
from ampwise.numerics.remedy import handover
from ampwise.numerics.remedy.costs import Cost, Run, cost_of
from ampwise.numerics.remedy.overlay import Overlay
from ampwise.places import kind_of
from ampwise.step.replay import Replay
from ampwise.tasks import Task, load_task


def cost_beside_original(
    task: Task, overlay: Overlay, content: Mapping[str, Any], before: Collection[str]
) -> Cost:
    """Time and activations of a patched task's step, relative to those of the task on disk.

    The overlay is removed, and what the task imported is imported anew.

    Parameters
    ----------
    before
        Names of the modules that were loaded before the task was.
    """
    try:
        changed = _run(task, content)
        overlay.remove()
        _forget(before)
        original = _run(load_task(content["spec"], content["settings"]), content)
        return cost_of(original, changed)
    except Exception as error:  # noqa: BLE001 - the user's source, loaded twice, may do anything
        return Cost(f"cost not measured: {kind_and_words(error)}")


def _run(task: Task, content: Mapping[str, Any]) -> Run:
    arm, stash = handover.restored(task, content)
    return Run(Replay(arm.step), stash)


def _forget(before: Collection[str]) -> None:
    """Drop the user's modules that were loaded since."""
    for name in [each for each in sys.modules if each not in before]:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and kind_of(file) == "user":
            del sys.modules[name]
