"""# double-unscale

## What it does
Reports a second `scaler.unscale_(optimizer)` for the same optimizer before `update()`: two
calls in one step, one call that runs on every micro-batch of an accumulation window, or one behind
which a batch is left (`if isnan(norm): continue`) with no `update()`.

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

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.branches import passed
from ampwise_lint.queries.edits import is_of_each, receiver
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import functions_of, is_inside
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.events import Backward, Event, ScalerStep, Unscale, Update, ZeroGrad


@rule("AMP103", "double-unscale", "error", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        done: dict[int, Unscale] = {}
        for index, event in enumerate(trace.events):
            match event:
                case Update():
                    done = {}
                case Unscale(optimizer=optimizer):
                    first = done.get(id(optimizer))
                    if first is not None and _repeats(first, event):
                        between = trace.events[trace.events.index(first) : index]
                        yield _mistake(first, event, between)
                    done[id(optimizer)] = event
                case ScalerStep(optimizer=optimizer):
                    first = done.pop(id(optimizer), None)
                    if first is not None and (left := _left_between(first, event)) is not None:
                        yield _left(first, left)
                case _:
                    pass


def _repeats(first: Unscale, second: Unscale) -> bool:
    """Within one function, or one loop: not two callers of a helper, nor a loop over optimizers."""
    if first.node is second.node and is_of_each(second):
        return False
    return bool(second.context.loops) or first.context.functions == second.context.functions


FOR_A_BATCH = re.compile(r"step|batch|iter|update|optimi", re.IGNORECASE)
"""Names of functions that are called for each batch."""


def _left_between(first: Unscale, step: ScalerStep) -> ast.If | None:
    """An ``if`` between `unscale_` and the step that goes on to the next batch without update()."""
    module, loops = step.module, step.context.loops
    if first.module is not module:
        return None
    inner = loops[-1].node if loops else None
    for each in passed(step, inner):
        if not first.node.lineno < each.lineno < step.node.lineno or _updates(first, each):
            continue
        if isinstance(each.body[-1], ast.Continue):
            return each
        in_loop = inner is not None and is_inside(module, each, inner)
        name = getattr(next(iter(functions_of(module, each)), None), "name", "")
        if not in_loop and FOR_A_BATCH.search(name):
            return each
    return None


def _updates(first: Unscale, branch: ast.If) -> bool:
    """Whether a branch calls update(), or hands the scaler on, or is part of the window."""
    scaler = receiver(first.node)
    text = ast.unparse(branch)
    return not scaler or scaler in text or "%" in ast.unparse(branch.test)


def _left(first: Unscale, branch: ast.If) -> Mistake:
    return Mistake(
        first.node,
        first.module,
        f"line {branch.body[-1].lineno} goes on to the next batch without update(): unscale_ is "
        "then called a second time for this optimizer and raises RuntimeError; call update() "
        "before, or leave the batch out before unscale_",
    )


def _mistake(first: Unscale, second: Unscale, between: list[Event]) -> Mistake:
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
        f"RuntimeError (first in line {first.node.lineno}); {_instead(between)}",
    )


def _instead(between: list[Event]) -> str:
    """What to do about two calls, by what happens between them."""
    if not any(isinstance(each, Backward) for each in between):
        return "remove one of the calls"
    if any(isinstance(each, ZeroGrad) for each in between):
        return "the gradients of both backward passes need it: call update() between them"
    return "call it once, behind the last backward"
