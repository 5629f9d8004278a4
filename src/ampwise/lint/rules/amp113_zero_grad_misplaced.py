"""# zero-grad-misplaced

## What it does
Reports gradients that are zeroed between backward and step, zeroed on every micro-batch of an
accumulation window, or never zeroed at all.

## Why is this bad
Zeroed before the step, there is nothing to apply: AssertionError "No inf checks were recorded
for this optimizer." (with a fused optimizer it is `update()` that raises). Zeroed inside a
window of 8, only the last micro-batch counts. Never zeroed, each step applies the sum of all
batches so far.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: where zeroing belongs depends on the window that is meant.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import Backward, Event, OptimizerStep, ScalerStep, ZeroGrad
from ampwise.lint.model.queries import (
    accumulates,
    is_managed,
    same_owner,
    uses_amp,
    zeroed_with,
)
from ampwise.lint.model.values import Optimizer, Parameter
from ampwise.lint.rule import Mistake, rule


@rule("AMP113", "zero-grad-misplaced", "error")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    never: dict[int, Event] = {}
    zeroed: set[int] = set()
    for trace in code.traces:
        if is_managed(trace):
            return
        yield from _before_step(trace)
        yield from _inside_window(trace)
        for step in trace.events:
            if isinstance(step, ScalerStep | OptimizerStep) and _is_plain(trace, step):
                (
                    zeroed.add(id(step.node))
                    if _zeroes(trace)
                    else never.setdefault(id(step.node), step)
                )
    for place, step in never.items():
        if place not in zeroed and not code.any(ZeroGrad):
            yield Mistake(
                step.node,
                step.module,
                "gradients are never zeroed: each step adds those of all earlier ones; call "
                "optimizer.zero_grad() before each backward (or behind each step)",
            )


def _is_plain(trace: Trace, step: Event) -> bool:
    loops = step.context.loops
    return bool(loops) and any(
        each.context.loops and each.context.loops[-1].node is loops[-1].node
        for each in trace.of(Backward)
    )


def _zeroes(trace: Trace) -> bool:
    return any(isinstance(each, ZeroGrad) for each in trace.events)


def _before_step(trace: Trace) -> Iterator[Mistake]:
    """Zeroed between the only backward and the step."""
    for index, event in enumerate(trace.events):
        if not isinstance(event, ZeroGrad) or isinstance(event.of, Parameter):
            continue
        before = _last(trace.events[:index])
        after = next(
            (
                e
                for e in trace.events[index + 1 :]
                if isinstance(e, Backward | ScalerStep | OptimizerStep)
            ),
            None,
        )
        if not isinstance(before, Backward) or not isinstance(after, ScalerStep | OptimizerStep):
            continue
        if not event.context.loops or before.context.loops[-1:] != after.context.loops[-1:]:
            continue
        if _same(event, after):
            yield Mistake(
                event.node,
                event.module,
                "gradients are zeroed between backward and step: the step applies nothing (with a "
                "scaler it raises: no inf checks); zero them before backward or behind the step",
            )


def _same(zero: ZeroGrad, step: ScalerStep | OptimizerStep) -> bool:
    if isinstance(zero.of, Optimizer):
        return zero.of is step.optimizer
    return same_owner(zero.of, step.optimizer) is True


def _last(events: list[Event]) -> Event | None:
    return next(
        (e for e in reversed(events) if isinstance(e, Backward | ScalerStep | OptimizerStep)), None
    )


def _inside_window(trace: Trace) -> Iterator[Mistake]:
    """Zeroed on every micro-batch of a window."""
    for backward, step in accumulates(trace):
        for event in zeroed_with(trace, backward):
            if _same(event, step):
                yield Mistake(
                    event.node,
                    event.module,
                    "gradients are zeroed on every micro-batch, but the step waits for the end of "
                    "the window: only the last micro-batch counts; zero them behind the step",
                )
