"""# scaler-with-retain-or-closure

## What it does
Reports `scaler.step` with more than the optimizer as an argument (a closure), and `scaler.step`
of LBFGS. Silent where a wrapper hands on its own `closure=None`.

## Why is this bad
`closure=` raises RuntimeError "Closure use is not currently supported if GradScaler is
enabled." LBFGS without one raises TypeError. A closure by position is passed on unseen and is
worse: LBFGS then works on gradients that are still multiplied by the loss scale, beginning at
65536.

## Example
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure=closure)

## Use instead
    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)

## Fix safety
No automatic fix: training without a scaler or with another optimizer is another training.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import defaults_of
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Const, Optimizer, Unknown
from ampwise_lint.values.events import Event, Made, ScalerStep


@rule("AMP114", "scaler-with-retain-or-closure", "error", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(ScalerStep):
            lbfgs = _is_lbfgs(trace, event)
            if _has_closure(event) or lbfgs:
                what = "LBFGS evaluates the loss several times a step" if lbfgs else "a closure"
                yield Mistake(
                    event.node,
                    event.module,
                    f"{what}: scaler.step does not support closures: with closure= it raises "
                    "RuntimeError, by position the closure runs on scaled gradients without a "
                    "word; use an optimizer without a closure, or bfloat16 without a scaler",
                )


def _is_lbfgs(trace: Trace, step: ScalerStep) -> bool:
    """Whether it steps LBFGS, made in a branch that goes with the one it stands in."""
    optimizer = step.optimizer
    if not isinstance(optimizer, Optimizer) or not optimizer.path.endswith("LBFGS"):
        return False
    return not any(_excludes(each, step) for each in trace.of(Made) if each.value is optimizer)


def _excludes(first: Event, second: Event) -> bool:
    """Whether one happens only where a condition holds, the other only where it does not."""
    taken = {each.key: each.taken for each in first.context.conditions}
    return any(taken.get(e.key, e.taken) is not e.taken for e in second.context.conditions)


def _has_closure(step: ScalerStep) -> bool:
    """Whether it is given a closure; one that a caller may hand in is none yet."""
    match step.closure:
        case None | Const(value=None):
            return False
        case Unknown(key=name, made="given"):
            return name not in _optional_parameters(step)
        case _:
            return True


def _optional_parameters(step: ScalerStep) -> set[str]:
    """Parameters of the function around that are None where a call does not say."""
    node: ast.AST | None = step.node
    while node is not None and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = step.module.parents.get(id(node))
    if node is None:
        return set()
    given = defaults_of(node.args).items()
    return {name for name, each in given if isinstance(each, ast.Constant) and each.value is None}
