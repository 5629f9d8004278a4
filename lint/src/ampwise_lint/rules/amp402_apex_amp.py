"""# apex-amp

## What it does
Reports imports of `apex.amp` and `apex.fp16_utils`. Other parts of apex (fused layers,
optimizers) are not reported.

## Why is this bad
apex.amp has been removed upstream, so the script runs only where an old apex is kept. Its opt
levels patch torch's functions; torch's own autocast and GradScaler do the same without.

## Example
    from apex import amp

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

## Use instead
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: opt levels have no one-to-one counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.triggers import OLD_PACKAGES


@rule("AMP402", "apex-amp", "warning", triggers=(OLD_PACKAGES,))
def check(code: Analysis) -> Iterator[Mistake]:
    found = code.module.imports
    direct = False
    for statement, names in found.statements:
        if part := next(filter(None, map(_part, names)), ""):
            direct = True
            yield _mistake(statement, code, part)
    if direct:
        return
    for node, full in code.module.imports.uses(code.module.index):
        if part := _part(full):
            yield _mistake(node, code, part)


def _part(name: str) -> str:
    """The part of apex that a full name is in, if it is one that is gone."""
    return next((each for each in GONE if name == each or name.startswith(f"{each}.")), "")


GONE = {
    "apex.amp": ": its opt levels patch torch functions and break with new versions",
    "apex.fp16_utils": "",
}
"""What became of parts of apex."""


def _mistake(node: Node, code: Analysis, part: str) -> Mistake:
    return Mistake(
        node,
        code.module,
        f"{part} is no longer developed and is gone from current apex{GONE[part]}; use "
        "torch.amp.autocast and torch.amp.GradScaler",
    )
