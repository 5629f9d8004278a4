"""# update-per-optimizer

## What it does
Reports all but the last `scaler.update()` of an iteration that steps several optimizers through
one scaler. Several scalers with one update each are right.

## Why is this bad
Both backward passes before the first update: when A overflows, the scale is halved before B is
unscaled. B's gradients were multiplied by 65536 and are divided by 32768, so B moves twice as far
(measured: 0.2 instead of 0.1). Where B's backward comes behind that update, only the growth
interval of 2000 steps is off, as every iteration counts twice: that is reported as info.

## Example
    scaler.scale(loss_d + loss_g).backward()
    scaler.step(opt_d)
    scaler.update()
    scaler.step(opt_g)
    scaler.update()

## Use instead
    scaler.scale(loss_d + loss_g).backward()
    scaler.step(opt_d)
    scaler.step(opt_g)
    scaler.update()

## Fix safety
Unsafe: `--unsafe-fixes` removes the earlier update. The scale then grows and falls at another
pace, and an overflow of one optimizer lowers the scale only at the end of the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import is_simple, statement_edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.events import Backward, ScalerStep, Update

UNFIT = (
    "when one overflows, the next is unscaled by a scale its gradients were not multiplied with, "
    "and steps too far"
)
COUNTED = (
    "the growth interval counts each iteration as often, so the scale grows sooner than it should"
)


@rule("AMP108", "update-per-optimizer", "error", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for updates in _by_iteration(trace).values():
            for earlier, later in pairwise(updates):
                if _stepped_between(trace, earlier, later):
                    yield _mistake(trace, earlier, later)
        yield from _in_loops(trace)


def _in_loops(trace: Trace) -> Iterator[Mistake]:
    """``for optimizer in optimizers: scaler.step(optimizer); scaler.update()``."""
    updates = trace.of(Update)
    for earlier, later in pairwise(updates):
        if earlier.node is not later.node or earlier.scaler is not later.scaler:
            continue
        first, second = trace.events.index(earlier), trace.events.index(later)
        before = [e for e in trace.events[:first] if isinstance(e, Backward | ScalerStep)]
        between = [e for e in trace.events[first:second] if isinstance(e, Backward | ScalerStep)]
        match before, between:
            case [*_, Backward(scaled=scaled), ScalerStep() as one], [ScalerStep() as other] if (
                scaled is later.scaler and one.optimizer is not other.optimizer
            ):
                yield Mistake(
                    earlier.node,
                    earlier.module,
                    f"update() runs once per optimizer: {UNFIT}; call update() once, behind the "
                    "loop over the optimizers",
                )
            case _:
                pass


def _by_iteration(trace: Trace) -> dict[tuple[int, int], list[Update]]:
    """Updates of each scaler in each iteration of the loop around them, or in a step's function."""
    found: dict[tuple[int, int], list[Update]] = {}
    for each in trace.of(Update):
        loops = each.context.loops
        if loops or each.context.functions:
            key = (loops[-1].serial if loops else 0, id(each.scaler))
            found.setdefault(key, []).append(each)
    return found


def _stepped_between(trace: Trace, earlier: Update, later: Update) -> bool:
    """Whether the two updates belong to steps of different optimizers."""
    first, second = trace.events.index(earlier), trace.events.index(later)
    before = [
        each.optimizer
        for each in trace.events[:first]
        if isinstance(each, ScalerStep) and each.context.loops[-1:] == earlier.context.loops[-1:]
    ]
    between = [
        each.optimizer for each in trace.events[first:second] if isinstance(each, ScalerStep)
    ]
    return bool(before and between) and any(each is not before[-1] for each in between)


def _is_rescaled(trace: Trace, earlier: Update, later: Update) -> bool:
    """Whether a backward between the two is scaled by what the first one left."""
    first, second = trace.events.index(earlier), trace.events.index(later)
    return any(
        isinstance(each, Backward) and each.scaled is later.scaler
        for each in trace.events[first:second]
    )


def _mistake(trace: Trace, earlier: Update, later: Update) -> Mistake:
    edits = (statement_edit("remove", earlier.module, earlier.node),) if is_simple(trace) else ()
    rescaled = _is_rescaled(trace, earlier, later)
    return Mistake(
        earlier.node,
        earlier.module,
        f"update() runs once per optimizer: {COUNTED if rescaled else UNFIT}; call update() once "
        f"an iteration, as in line {later.node.lineno}",
        edits,
        severity="info" if rescaled else None,
    )
