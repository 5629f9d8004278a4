"""# accumulation-not-averaged

## What it does
Reports backward of a loss that is not divided (or weighted), when gradients of several
micro-batches add up before the step. Dividing the gradients instead of the loss counts as well.

## Why is this bad
With mean losses, N micro-batches give N times the gradient of the global batch: the step is N
times too large for SGD, clipping bites N times as often, and float16 gradients of activations
are N times larger, so the loss scale has to be N times smaller to keep them below 65504.

## Example
    for i, (x, y) in enumerate(loader):
        scaler.scale(criterion(model(x), y)).backward()
        if (i + 1) % 8 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Use instead
    for i, (x, y) in enumerate(loader):
        scaler.scale(criterion(model(x), y) / 8).backward()
        if (i + 1) % 8 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Fix safety
No automatic fix: whether to divide by the window or weight by samples, and whether the learning
rate was tuned on the sum, only the author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import Backward, GradientRead, OptimizerStep, ScalerStep, ZeroGrad
from ampwise.lint.model.queries import accumulates, is_managed, uses_amp
from ampwise.lint.model.values import Const, Tensor, Unknown
from ampwise.lint.rule import Mistake, rule


@rule("AMP109", "accumulation-not-averaged", "warning", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    found: dict[int, Backward] = {}
    for trace in code.traces:
        if is_managed(trace) or any(
            each.is_edit and each.divisor is not None for each in trace.of(GradientRead)
        ):
            continue
        for backward, step in accumulates(trace):
            if _is_plain_sum(trace, backward, step):
                found.setdefault(id(backward.node), backward)
    # The same loss, with and without scaling, is one mistake.
    scaled = [each for each in found.values() if each.scaled is not None]
    yield from map(_mistake, scaled or found.values())


def _is_plain_sum(trace: Trace, backward: Backward, step: ScalerStep | OptimizerStep) -> bool:
    loss = backward.tensor
    if not isinstance(loss, Tensor) or isinstance(loss.of, Unknown):
        return False
    if loss.divided and not isinstance(loss.divisor, Const):
        return False
    if loss.divided and isinstance(loss.divisor, Const):
        value = loss.divisor.value
        if not isinstance(value, int | float) or value not in (1, 2, 3):
            return False
    zeroed = [e for e in trace.of(ZeroGrad) if e.context.loops]
    window = [e for e in zeroed if e.context.loops[-1].serial == backward.context.loops[-1].serial]
    # Gradients that are zeroed on each micro-batch do not add up.
    return not any(not e.context.is_periodic for e in window) or _is_nested(backward, step)


def _is_nested(backward: Backward, step: ScalerStep | OptimizerStep) -> bool:
    return len(backward.context.loops) > len(step.context.loops)


def _mistake(backward: Backward) -> Mistake:
    return Mistake(
        backward.node,
        backward.module,
        "gradients of several micro-batches add up, and the loss is not divided by their number: "
        "the step is that many times too large, and in float16 overflows that much sooner; divide "
        "the loss by the number of micro-batches (or weight it by samples) before backward",
    )
