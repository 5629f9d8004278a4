"""# backward-without-scale

## What it does
Reports `loss.backward()` on a loss that was not scaled, when the optimizer that takes its
gradients is stepped through a gradient scaler.

## Why is this bad
If nothing was scaled yet, `scaler.step` raises AssertionError "Attempted step but _scale is
None." If another loss was scaled before, `step` divides these gradients by the loss scale, too:
at first they are 65536 times too small. In float16 they may have become zero in backward
already, since nothing kept them above 6e-8.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Safe: `--fix` writes `scaler.scale(loss).backward()`, with the scaler of the step behind it.
Nothing else in the step changes, and a disabled scaler returns the loss as it is. No edit with
several scalers or a closure, and where the scaler has another name at the backward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import edit, is_known_at, is_simple, receiver
from ampwise_lint.queries.owners import networks_in, owners
from ampwise_lint.queries.precision import is_real, is_unscaled
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.events import Backward, OptimizerStep, ScalerStep, ZeroGrad


@rule("AMP104", "backward-without-scale", "error", fix="safe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for index, event in enumerate(trace.events):
            if isinstance(event, Backward) and is_unscaled(event):
                step = _step_behind(trace, index)
                if step is not None and not _is_other_way(code, event, step):
                    yield _mistake(trace, event, step)


def _is_other_way(code: Analysis, event: Backward, step: ScalerStep) -> bool:
    """``if amp: scaler.scale(loss).backward()``, else this, with a scaler that may be disabled."""
    if step.scaler.path:
        return False
    ways = {(id(e.node), not e.taken) for e in event.context.conditions}
    scaled = [each for each in code.of(Backward) if is_real(each.scaled)]
    return any((id(e.node), e.taken) in ways for each in scaled for e in each.context.conditions)


def _has_own_step(trace: Trace, index: int) -> bool:
    """Whether an optimizer of its networks steps behind it, without the scaler."""
    backward = trace.events[index]
    assert isinstance(backward, Backward)
    through = networks_in(trace, backward)
    for event in trace.events[index + 1 :]:
        if isinstance(event, OptimizerStep) and owners(event.optimizer) & through:
            return True
        if isinstance(event, ScalerStep) and owners(event.optimizer) & through:
            return False
    return False


def _step_behind(trace: Trace, index: int) -> ScalerStep | None:
    """The scaler's step that uses the gradients of a backward, if one does."""
    if _has_own_step(trace, index):
        return None
    pending = _pending(trace, index)
    for event in trace.events[index + 1 :]:
        match event:
            case ScalerStep(scaler=scaler):
                # With several scalers, steps on gradients of before need not be on these, too.
                return None if len(pending) > 1 and id(scaler) in pending else event
            case OptimizerStep() | ZeroGrad():
                return None
            case Backward(scaled=scaled) if is_real(scaled):
                # What follows steps on this one's gradients, too; only the same window tells.
                if event.context.loops != trace.events[index].context.loops:
                    return None
            case _:
                pass
    return None


def _pending(trace: Trace, index: int) -> set[int]:
    """Scalers of the backward passes before one that nobody has stepped on yet, by ``id``."""
    found: set[int] = set()
    for event in trace.events[:index]:
        match event:
            case Backward(scaled=scaled) if is_real(scaled):
                found.add(id(scaled))
            case ScalerStep(scaler=scaler):
                found.discard(id(scaler))
            case _:
                pass
    return found


def _mistake(trace: Trace, event: Backward, step: ScalerStep) -> Mistake:
    scaler = receiver(step.node) or "scaler"
    edits = ()
    node = event.node
    if (
        is_simple(trace)
        and event.module is step.module
        and is_known_at(step.module, step.node, node)
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
    ):
        tensor = event.module.text_of(node.func.value)
        edits = (edit("replace", node.func.value, f"{scaler}.scale({tensor})"),)
    return Mistake(
        node,
        event.module,
        f"backward runs on the unscaled loss, but the optimizer is stepped through {scaler}, which "
        f"divides by the loss scale: updates are up to 65,536 times too small, or step raises "
        f"where nothing was ever scaled; write "
        f"{scaler}.scale(loss).backward()",
        edits,
    )
