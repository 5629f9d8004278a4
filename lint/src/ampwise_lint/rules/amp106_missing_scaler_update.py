"""# missing-scaler-update

## What it does
Reports `scaler.step(optimizer)` that comes round again with no `scaler.update()` on the way.
Silent for a helper without a backward that was handed its scaler: its caller may update.

## Why is this bad
The second step raises RuntimeError "step() has already been called since the last update().";
after an explicit `unscale_`, "unscale_() is being called after step()." The loss scale stays at
65536, neither halved after an overflow nor doubled after 2000 good steps.

## Example
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(x, y)).backward()
        scaler.step(optimizer)

## Use instead
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

## Fix safety
Safe: `--fix` puts `scaler.update()` behind the step. Without it the next step raises, so no
working script changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import is_of_each, receiver, statement_edit
from ampwise_lint.queries.wrappers import is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Scaler, key_of
from ampwise_lint.values.events import Backward, ScalerStep, Update


@rule("AMP106", "missing-scaler-update", "error", fix="safe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    missing: dict[int, ScalerStep] = {}
    fine: set[int] = set()
    again: dict[int, ScalerStep] = {}
    updated = {key_of(e.scaler) for e in code.of(Update)}
    looped = {id(e.context.loops[-1].node) for e in code.of(Update) if e.context.loops}
    for trace in code.traces:
        if is_managed(trace):
            continue
        waiting: list[ScalerStep] = []
        stale: list[ScalerStep] = []
        for event in trace.events:
            match event:
                case Update(scaler=scaler):
                    fine |= {id(each.node) for each in waiting if each.scaler is scaler}
                    waiting = [each for each in waiting if each.scaler is not scaler]
                case ScalerStep():
                    repeated = any(e.node is event.node for e in stale) and not is_of_each(event)
                    if repeated and not _in(event, looped):
                        again[id(event.node)] = event
                    waiting.append(event)
                case Backward():
                    stale = list(waiting)
                case _:
                    pass
        last = _last_of_each(waiting)
        parts = [each for each in last if _is_part_of_a_step(each, trace, updated)]
        missing |= {id(each.node): each for each in last if each not in parts}
    for place, step in missing.items():
        if place not in fine:
            yield _mistake(step)
    yield from map(_mistake, again.values())


def _in(step: ScalerStep, loops: set[int]) -> bool:
    """Whether an update runs in the loop that the step runs in, or one inside it."""
    return not step.context.loops or id(step.context.loops[-1].node) in loops


def _last_of_each(steps: list[ScalerStep]) -> list[ScalerStep]:
    """Of the steps of one iteration the last: the update goes behind it."""
    return list({e.context.loops[-1:]: e for e in steps}.values())


def _is_part_of_a_step(step: ScalerStep, trace: Trace, updated: set[str]) -> bool:
    """No loop with a backward is around it, and it was handed its scaler: its caller may update."""
    handed = isinstance(step.scaler, Scaler) and not step.scaler.path
    alone = not step.context.loops or not trace.of(Backward)
    return alone and (handed or key_of(step.scaler) in updated)


def _mistake(step: ScalerStep) -> Mistake:
    scaler = receiver(step.node) or "scaler"
    return Mistake(
        step.node,
        step.module,
        f"no {scaler}.update() follows: the loss scale never adapts, and the next unscale_ of this "
        f"optimizer raises RuntimeError; call {scaler}.update() once behind the last step",
        (statement_edit("after", step.module, step.node, f"{scaler}.update()"),),
    )
