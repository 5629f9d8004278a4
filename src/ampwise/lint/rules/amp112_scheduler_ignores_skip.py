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
Unsafe: `--unsafe-fixes` writes the condition above where `scaler.step`, `update()` and
`scheduler.step()` stand one after the other in one block; a scheduler before `update()` moves
behind it. Each `get_scale()` is a host sync, which is its price (AMP301 does not report these
two). A scale that has fallen to 0 falls no further, so a skip is not seen there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.lint.findings import Edit
from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import ScalerStep, SchedulerStep, Update
from ampwise.lint.model.places import alone, block_of, names, scope_of, with_comment, wrap
from ampwise.lint.model.queries import edit, receiver
from ampwise.lint.model.roles import dotted
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
                    _edits(event, trace),
                )


def _asks(event: SchedulerStep) -> bool:
    """Whether it stands under a condition that looks at the scale."""
    return any(
        "scale" in each.key or "skip" in each.key or "overflow" in each.key
        for each in event.context.conditions
    )


def _edits(event: SchedulerStep, trace: Trace) -> tuple[Edit, ...]:
    """Read the scale before the step, and step the scheduler behind the update if it did not fall.

    Only where all three are statements of one block: elsewhere a path may pass one and not the
    others.
    """
    module, node = event.module, event.node
    statement = alone(module, node) if isinstance(node, ast.expr) else None
    if statement is None:
        return ()
    block = block_of(module, statement)
    steps = _among(block, trace, ScalerStep)
    updates = _among(block, trace, Update)
    if not steps or not updates or block.index(steps[0]) > block.index(statement):
        return ()
    first, update = steps[0], updates[-1]
    scaler = receiver(first.value)
    if any(receiver(each.value) != scaler for each in (*steps, *updates)) or not scaler:
        return ()
    if block.index(update) < block.index(first):
        return ()
    known = _read_before(block, first, scaler)
    name = known or _new_name(names(scope_of(module, node)))
    read = () if known else (edit("before", first, f"{name} = {scaler}.get_scale()"),)
    header = f"if {scaler}.get_scale() >= {name}:"
    if block.index(statement) > block.index(update):
        return (*read, wrap(statement, statement, header))
    moved = with_comment(module, statement)
    text = f"{header}\n    {moved}\n"
    return (*read, edit("remove", statement), edit("after", update, text)) if moved else ()


def _among(block: list[ast.stmt], trace: Trace, kind: type[ScalerStep | Update]) -> list[ast.Expr]:
    """The statements of a block that are such calls, in order."""
    calls = {id(each.node) for each in trace.of(kind)}
    return [each for each in block if isinstance(each, ast.Expr) and id(each.value) in calls]


def _read_before(block: list[ast.stmt], step: ast.stmt, scaler: str) -> str:
    """The name that holds the scale before the step already."""
    for each in block[: block.index(step)]:
        match each:
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute(attr="get_scale"))):
                if receiver(each.value) == scaler:
                    return dotted(target)
            case _:
                pass
    return ""


def _new_name(taken: set[str]) -> str:
    name = "scale_before"
    return f"{name}_step" if name in taken else name
