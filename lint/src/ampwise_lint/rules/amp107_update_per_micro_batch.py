"""# update-per-micro-batch

## What it does
Reports `scaler.update()` on every micro-batch while the step waits for the end of the
accumulation window, and `scaler.step` on every micro-batch while only the zeroing waits.

## Why is this bad
An update with no step before it raises AssertionError "No inf checks were recorded prior to
update." A step on every micro-batch applies the first micro-batch of a window again with each
of the others, and a scale that changes inside a window weighs its micro-batches differently.

## Example
    for i, batch in enumerate(loader):
        scaler.scale(loss_of(batch) / 4).backward()
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

## Use instead
    for i, batch in enumerate(loader):
        scaler.scale(loss_of(batch) / 4).backward()
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Fix safety
Unsafe: `--unsafe-fixes` moves `update()` behind the step, so the scale follows other events
than before. A step on every micro-batch is not fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import is_simple, statement_edit
from ampwise_lint.queries.precision import is_real
from ampwise_lint.queries.wrappers import is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Tensor
from ampwise_lint.values.events import (
    Backward,
    Event,
    OptimizerStep,
    ScalerStep,
    Unscale,
    Update,
    ZeroGrad,
)


@rule("AMP107", "update-per-micro-batch", "error", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        if is_managed(trace):
            continue
        yield from _updates(trace)
        yield from _steps(trace)


def _updates(trace: Trace) -> Iterator[Mistake]:
    """An update that no step or unscale_ goes before, nor one past the scaler, which is AMP105."""
    since: list[Event] = []
    for event in trace.events:
        match event:
            case ScalerStep() | Unscale() | OptimizerStep() | Backward():
                since.append(event)
            case Update():
                has_backward = any(isinstance(e, Backward) and is_real(e.scaled) for e in since)
                has_step = any(not isinstance(e, Backward) for e in since)
                if has_backward and not has_step:
                    yield from _unpaired(trace, event)
                since = []
            case _:
                pass


def _unpaired(trace: Trace, update: Update) -> Iterator[Mistake]:
    later = _step_later(trace, update)
    if later is not None:
        yield _update_mistake(trace, update, later)
    elif update.context.loops and not trace.of(ScalerStep):
        yield Mistake(
            update.node,
            update.module,
            "update() without a step or unscale_ before it: it finds no inf checks and raises "
            "AssertionError; call scaler.step(optimizer) first",
        )


def _step_later(trace: Trace, update: Update) -> ScalerStep | None:
    """The step of the window's end, in the same loop."""
    if not update.context.loops:
        return None
    loop = update.context.loops[-1].node
    return next(
        (
            each
            for each in trace.of(ScalerStep)
            if any(around.node is loop for around in each.context.loops)
            and len(each.context.conditions) > len(update.context.conditions)
        ),
        None,
    )


def _update_mistake(trace: Trace, update: Update, step: ScalerStep) -> Mistake:
    edits = ()
    if update.module is step.module and is_simple(trace):
        edits = (
            statement_edit("remove", update.module, update.node),
            statement_edit("after", step.module, step.node, update.module.text_of(update.node)),
        )
    return Mistake(
        update.node,
        update.module,
        "update() runs on every micro-batch, but the step only at the end of the window: without a "
        "step it finds no inf checks and raises, or changes the scale inside a window, so that "
        f"micro-batches weigh differently; move it behind the step in line {step.node.lineno}",
        edits,
    )


def _steps(trace: Trace) -> Iterator[Mistake]:
    """A step on every micro-batch, while gradients are zeroed only at the window's end."""
    for step in trace.of(ScalerStep):
        if not step.context.loops or step.context.is_periodic:
            continue
        loop = step.context.loops[-1]
        zeroed = [
            each
            for each in trace.of(ZeroGrad)
            if each.context.loops and each.context.loops[-1].node is loop.node
        ]
        divided = any(
            isinstance(each.tensor, Tensor) and each.tensor.divided for each in trace.of(Backward)
        )
        if _serials(zeroed) >= _serials(trace.of(ScalerStep)):
            continue  # micro-batches inside a window leave before both
        if zeroed and divided and all(_waits(each, step) for each in zeroed):
            yield Mistake(
                step.node,
                step.module,
                "step runs on every micro-batch while gradients are zeroed only at the end of the "
                "window: early micro-batches are applied again and again; step and update() only "
                "when the window is complete",
            )


def _serials(events: Sequence[Event]) -> set[int]:
    """The iterations in which something happens."""
    return {each.context.loops[-1].serial for each in events if each.context.loops}


def _waits(zero: ZeroGrad, step: ScalerStep) -> bool:
    own = {id(each.node) for each in step.context.conditions}
    return any(each.periodic and id(each.node) not in own for each in zero.context.conditions)
