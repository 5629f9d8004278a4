"""# scaler-recreated

## What it does
Reports a `GradScaler(...)` made inside the training loop or once per epoch. Silent where the
same loop makes a new optimizer, too (folds, trials): that is a new training; and where a loop over
epochs runs inside (stages).

## Why is this bad
Each new scaler starts at 65536 with a growth tracker of 0. If the model needs 1024, every epoch
begins with six skipped steps; and an epoch of fewer than 2000 steps never sees the scale grow.

## Example
    for epoch in range(90):
        scaler = torch.amp.GradScaler("cuda")
        for batch in loader:
            train_step(model, batch, optimizer, scaler)

## Use instead
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(90):
        for batch in loader:
            train_step(model, batch, optimizer, scaler)

## Fix safety
Unsafe: `--unsafe-fixes` moves the statement before the loop where it stands directly in one. A
scaler made in a function that is called in a loop has to be handed in: that is left to the author.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.scalers import first_scale, recreated
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Scaler
from ampwise_lint.values.events import Made


@rule("AMP110", "scaler-recreated", "warning", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    yield from map(_mistake, recreated(code))


def _mistake(event: Made) -> Mistake:
    scaler = event.value
    assert isinstance(scaler, Scaler)
    return Mistake(
        event.node,
        event.module,
        "a new GradScaler is made in the training loop: each starts again at "
        f"{first_scale(scaler)}, skips steps until the scale fits, and grows only if it lasts "
        "2,000 steps; make one before the loop",
        _edits(event),
    )


def _edits(event: Made) -> tuple[Edit, ...]:
    """Move the statement before the loop it stands in."""
    if not event.context.loops:
        return ()  # to be handed in
    statement = event.module.statement_of(event.node)
    loop = event.context.loops[-1].node
    if not isinstance(loop, ast.For | ast.While) or statement not in loop.body:
        return ()
    text = event.module.text_of(statement)
    return (edit("before", loop, text), edit("remove", statement))
