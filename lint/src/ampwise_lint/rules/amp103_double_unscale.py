"""# double-unscale

## What it does
Reports a second `scaler.unscale_(optimizer)` for the same optimizer before `update()`: two
calls in one step, or one call that runs on every micro-batch of an accumulation window.

## Why is this bad
The second call raises RuntimeError "unscale_() has already been called on this optimizer since
the last update()." In a window the first call comes too early as well: gradients of later
micro-batches would be added scaled to gradients that are not.

## Example
    for i, batch in enumerate(loader):
        scaler.scale(loss_of(batch) / 4).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Use instead
    for i, batch in enumerate(loader):
        scaler.scale(loss_of(batch) / 4).backward()
        if (i + 1) % 4 == 0:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Fix safety
No automatic fix: which of the calls is meant to stay, only the author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries import is_of_each
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.events import ScalerStep, Unscale, Update


@rule("AMP103", "double-unscale", "error", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        done: dict[int, Unscale] = {}
        for event in trace.events:
            match event:
                case Update():
                    done = {}
                case Unscale(optimizer=optimizer):
                    first = done.get(id(optimizer))
                    if first is not None and _repeats(first, event):
                        yield _mistake(first, event)
                    done[id(optimizer)] = event
                case ScalerStep(optimizer=optimizer):
                    done.pop(id(optimizer), None)
                case _:
                    pass


def _repeats(first: Unscale, second: Unscale) -> bool:
    """Within one function, or one loop: not two callers of a helper, nor a loop over optimizers."""
    if first.node is second.node and is_of_each(second):
        return False
    return bool(second.context.loops) or first.context.functions == second.context.functions


def _mistake(first: Unscale, second: Unscale) -> Mistake:
    if first.node is second.node:
        return Mistake(
            second.node,
            second.module,
            "unscale_ runs on every micro-batch of an accumulation window: the second call raises "
            "RuntimeError, and gradients of later micro-batches would be added scaled; call it "
            "once, on the last micro-batch, before clipping",
        )
    return Mistake(
        second.node,
        second.module,
        f"unscale_ is called a second time for this optimizer before update(): it raises "
        f"RuntimeError (first in line {first.node.lineno}); remove one of the calls",
    )
