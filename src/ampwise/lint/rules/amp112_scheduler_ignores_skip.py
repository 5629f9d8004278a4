"""# scheduler-ignores-skip

## What it does
Reports a per-step `scheduler.step()` beside `scaler.step`, with no regard to skipped steps.
Silent for schedules per epoch, for those that are given a metric, and under a condition on the
scale.

## Why is this bad
A skipped step changes no parameter, but the schedule moves on. From 65536 down to a scale that
fits, the first steps of a run are often skipped, which is where warm-up is. If the very first
step is skipped, torch warns "Detected call of `lr_scheduler.step()` before `optimizer.step()`"
(unfused optimizers).

## Example
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()

## Use instead
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()

## Fix safety
No automatic fix: each `get_scale()` is a host sync, and whether the schedule's exactness is
worth two of them per step, only the author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import ScalerStep, SchedulerStep
from ampwise.lint.model.values import Scheduler
from ampwise.lint.rule import Mistake, rule


@rule("AMP112", "scheduler-ignores-skip", "info", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        steps = [each for each in trace.of(ScalerStep) if each.context.loops]
        for event in trace.of(SchedulerStep):
            if event.has_argument or not event.context.loops or _asks(event):
                continue
            loop = event.context.loops[-1]
            if any(each.context.loops[-1].serial == loop.serial for each in steps) and isinstance(
                event.scheduler, Scheduler
            ):
                yield Mistake(
                    event.node,
                    event.module,
                    "the schedule moves on even when the scaler skipped the step: warm-up and "
                    "decay run ahead of the parameters; step it only if the scale did not fall "
                    "(before = scaler.get_scale(); ...; if scaler.get_scale() >= before)",
                )


def _asks(event: SchedulerStep) -> bool:
    """Whether it stands under a condition that looks at the scale."""
    return any(
        "scale" in each.key or "skip" in each.key or "overflow" in each.key
        for each in event.context.conditions
    )
