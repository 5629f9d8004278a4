"""# backward-under-autocast

## What it does
Reports `backward()` that runs inside an enabled autocast region: in the `with` block, or in a
function that is decorated with autocast.

## Why is this bad
Backward operations run in the dtype of their forward anyway, so nothing is gained. What ran in
float32 on purpose loses: the weight gradient of a linear layer outside autocast, taken inside a
bfloat16 region, was off by 2.7e-3 (measured on a CPU). torch documents backward under autocast
as not recommended.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)

## Fix safety
Safe: `--fix` moves backward and what follows it out of the `with` block, where that enters nothing
but autocast. A region that a decorator or a caller enters is reported and not fixed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.edits import statement_edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Region
from ampwise_lint.values.events import Backward


@rule("AMP201", "backward-under-autocast", "warning", fix="safe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Backward):
            region = event.context.region
            if region is None:
                continue
            alone = _stands_directly_in(event, region)
            edits = (statement_edit("out", event.module, event.node),) if alone else ()
            yield Mistake(
                event.node,
                event.module,
                "backward runs inside autocast: backward operations already run in the dtype of "
                "their forward; what hooks and custom functions do is cast a second time; "
                + _remedy(region),
                edits,
            )


def _remedy(region: Region) -> str:
    """How it gets out of a region, by what has opened that."""
    around = region.module.parents.get(id(region.node))
    if isinstance(around, ast.FunctionDef):
        return "decorate the function that computes the loss, not one that calls backward"
    if isinstance(region.node, ast.Call) and "autocast" not in ast.unparse(region.node.func):
        return (
            "the trainer has opened it around the step: leave it with torch.autocast(..., "
            "enabled=False)"
        )
    return "move it behind the with block"


def _stands_directly_in(event: Backward, region: Region) -> bool:
    """Whether it stands in a ``with`` block of autocast only: not of ``no_sync()`` as well."""
    block = event.module.parents.get(id(event.module.statement_of(event.node)))
    if not isinstance(block, ast.With) or len(block.items) != 1:
        return False
    entered = block.items[0].context_expr
    return region.module is event.module and (
        entered is region.node or not isinstance(entered, ast.Call)
    )
