"""Mixed-precision training for PyTorch that proves itself.

The public names, and nothing else. They are loaded when first used, so that importing ampwise does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampwise.errors import (
        AmpwiseError,
        CheckpointError,
        GateError,
        InactivePolicyError,
        MissingExtraError,
        PolicyError,
        RunError,
        SkippedStepsError,
        TaskError,
        UsageError,
    )
    from ampwise.numerics.diagnose import diagnose
    from ampwise.numerics.result import Diagnosis
    from ampwise.policy import Policy, Resolution, resolve
    from ampwise.step import Activity, Engine, LossScale, StepRecord, TrainStep
    from ampwise.step.window import Weight
    from ampwise.tasks import Task, load_task

__version__ = "0.1.0"

_HOMES = {
    "ampwise.errors": (
        "AmpwiseError", "CheckpointError", "GateError", "InactivePolicyError", "MissingExtraError",
        "PolicyError", "RunError", "SkippedStepsError", "TaskError", "UsageError",
    ),
    "ampwise.numerics.diagnose": ("diagnose",),
    "ampwise.numerics.result": ("Diagnosis",),
    "ampwise.policy": ("Policy", "Resolution", "resolve"),
    "ampwise.step": ("Activity", "Engine", "LossScale", "StepRecord", "TrainStep"),
    "ampwise.tasks": ("Task", "load_task"),
}  # fmt: skip
_PACKAGES = ("distributed", "step")
"""Packages with public names of their own."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Activity",
    "AmpwiseError",
    "CheckpointError",
    "Diagnosis",
    "Engine",
    "GateError",
    "InactivePolicyError",
    "LossScale",
    "MissingExtraError",
    "Policy",
    "PolicyError",
    "Resolution",
    "RunError",
    "SkippedStepsError",
    "StepRecord",
    "Task",
    "TaskError",
    "TrainStep",
    "UsageError",
    "__version__",
    "diagnose",
    "load_task",
    "resolve",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"ampwise.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ampwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def examine_fault(step: TrainStep) -> tuple[Diagnosis | None, str]:
    """What ``on_fault`` asks: why the last window of a step was skipped, and that in words.

    None if only the loss scale was too high. The analysis lies above the step and is loaded only
    when one fails, so it is this front that knows both.
    """
    fault = importlib.import_module("ampwise.numerics.on_fault")
    found = fault.examine(step)
    return found, "" if found is None else fault.summary(found)


def race_precisions(
    step: TrainStep, loss_fn: Callable[[Any, Any], Any], batch: Any, weight: Weight | None
) -> Resolution:
    """What ``auto`` asks: the fastest precision that holds on a step and its first batch.

    The race makes steps itself, and is loaded only when there is one.
    """
    resolution: Resolution = importlib.import_module("ampwise.step.race").race(
        step, loss_fn, batch, weight
    )
    return resolution


def __dir__() -> list[str]:
    return __all__
