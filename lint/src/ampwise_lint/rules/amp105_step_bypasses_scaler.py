"""# step-bypasses-scaler

## What it does
Reports `optimizer.step()` on gradients of a scaled backward: in place of
`scaler.step(optimizer)`, or beside it. Also `second_step()` of SAM, unless `unscale_` stands
before it.

## Why is this bad
The optimizer takes gradients that are multiplied by the loss scale: SGD moves 65536 times too
far at first. Nothing checks for inf and NaN either, so the first overflow ends in the
parameters. Beside `scaler.step` it steps a second time, and also when the scaler had decided to
skip.

## Example
    scaler.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()

## Use instead
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

## Fix safety
Safe: `--fix` writes `scaler.step(optimizer)`, with `scaler.update()` behind it where there is
none, or removes the call where the scaler steps already. No edit with several scalers, or where a
step is given a closure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit, is_known_at, is_simple, receiver, statement_edit
from ampwise_lint.queries.owners import networks_in, owners
from ampwise_lint.queries.precision import is_real
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import alone
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Scaler
from ampwise_lint.values.events import (
    Backward,
    OptimizerStep,
    ScalerStep,
    Unscale,
    Update,
    ZeroGrad,
)


@rule("AMP105", "step-bypasses-scaler", "error", fix="safe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for index, event in enumerate(trace.events):
            if isinstance(event, OptimizerStep) and (backward := _pending(trace, index, event)):
                yield _mistake(trace, event, backward)


def _pending(trace: Trace, index: int, step: OptimizerStep) -> Backward | None:
    """The scaled backward whose gradients a plain step takes."""
    through_scaler = another = False
    for event in reversed(trace.events[:index]):
        match event:
            case Backward(scaled=scaled):
                own = owners(step.optimizer)
                if not is_real(scaled) or (another and not own & networks_in(trace, event)):
                    return None
                return event
            case ScalerStep(optimizer=optimizer):
                if optimizer is step.optimizer:
                    through_scaler = True
                else:
                    another = True
            case OptimizerStep() | ZeroGrad() if not through_scaler:
                return None
            case Unscale() if _method(step) != "step":
                return None  # SAM's, whose steps no scaler makes
            case _:
                pass
    return None


def _method(step: OptimizerStep) -> str:
    """``step``, or ``second_step`` of SAM."""
    return dotted(getattr(step.node, "func", step.node)).rpartition(".")[2]


def _mistake(trace: Trace, step: OptimizerStep, backward: Backward) -> Mistake:
    scaler = _name(backward)
    optimizer = receiver(step.node) or "optimizer"
    method = _method(step)
    if method != "step":
        return Mistake(
            step.node,
            step.module,
            f"{optimizer}.{method}() goes around the scaler after a scaled backward: it takes "
            "gradients that are still multiplied by the loss scale, and inf and NaN too; divide "
            f"them first ({scaler}.unscale_({optimizer})), or train in bfloat16 without a scaler",
        )
    twice = any(
        isinstance(each, ScalerStep) and each.optimizer is step.optimizer for each in trace.events
    )
    edits = _edits(trace, step, backward, f"{scaler}.step({optimizer})", twice)
    harm = (
        "the optimizer steps a second time, without the check for inf and NaN"
        if twice
        else "it takes gradients that are still multiplied by the loss scale, and inf and NaN too"
    )
    return Mistake(
        step.node,
        step.module,
        f"{optimizer}.step() goes around the scaler after a scaled backward: {harm}; "
        + ("remove it" if twice else f"write {scaler}.step({optimizer}), then {scaler}.update()"),
        edits,
    )


def _edits(
    trace: Trace, step: OptimizerStep, backward: Backward, call: str, twice: bool
) -> tuple[Edit, ...]:
    """Step through the scaler, which has to have its name there, or only through the scaler."""
    module, node = step.module, step.node
    if not is_simple(trace) or module is not backward.module:
        return ()
    if twice:
        return (statement_edit("remove", module, node),) if alone(module, node) else ()
    scaling = _scaling(backward)
    if scaling is None or not is_known_at(module, scaling, node):
        return ()
    update = statement_edit("after", module, node, f"{receiver(scaling)}.update()")
    return (edit("replace", node, call), *([] if trace.of(Update) else [update]))


def _scaling(backward: Backward) -> ast.expr | None:
    """``scaler.scale(loss)``, whose backward it is."""
    node = backward.node
    return (
        node.func.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        else None
    )


def _name(backward: Backward) -> str:
    scaling = _scaling(backward)
    found = receiver(scaling) if scaling is not None else ""
    return found if found and isinstance(backward.scaled, Scaler) else "scaler"
