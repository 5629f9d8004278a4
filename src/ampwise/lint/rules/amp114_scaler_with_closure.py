"""# scaler-with-retain-or-closure

## What it does
Reports `scaler.step` with more than the optimizer as an argument (a closure), and `scaler.step`
of LBFGS.

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

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import ScalerStep
from ampwise.lint.model.values import Optimizer
from ampwise.lint.rule import Mistake, rule


@rule("AMP114", "scaler-with-retain-or-closure", "error")
def check(code: Analysis) -> Iterator[Mistake]:
    for event in code.of(ScalerStep):
        lbfgs = isinstance(event.optimizer, Optimizer) and event.optimizer.path.endswith("LBFGS")
        if event.arguments > 1 or lbfgs:
            what = "LBFGS evaluates the loss several times a step" if lbfgs else "a closure"
            yield Mistake(
                event.node,
                event.module,
                f"{what}: scaler.step does not support closures: with closure= it raises "
                "RuntimeError, by position the closure runs on scaled gradients without a word; "
                "use an optimizer without a closure, or bfloat16 without a scaler",
            )
