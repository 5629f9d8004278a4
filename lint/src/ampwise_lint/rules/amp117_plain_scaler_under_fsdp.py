"""# scaler-shared-or-plain-under-fsdp

## What it does
Reports a plain `GradScaler(...)` that steps a network wrapped in `FullyShardedDataParallel`
(FSDP1).

## Why is this bad
Each rank holds its own shard of the gradients, and the plain scaler looks for inf in these
alone. When one rank overflows, it skips and halves its scale while the others step: parameters
and scales of the ranks part. `ShardedGradScaler` all-reduces found_inf in `unscale_`. A fused
optimizer skips that call: leave `fused=True` out here.

## Example
    model = FullyShardedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

## Use instead
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = ShardedGradScaler()

## Fix safety
Unsafe: `--unsafe-fixes` writes the class's full name where `torch` is imported. A device
argument has to suit, and every rank now waits for an all-reduce in each step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Instance, Model, Scaler
from ampwise_lint.values.events import Forward, ScalerStep


@rule("AMP117", "scaler-shared-or-plain-under-fsdp", "error", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        sharded = any(
            isinstance(each.model, Model | Instance) and each.model.wrapped == "fsdp"
            for each in trace.of(Forward)
        )
        if not sharded:
            continue
        for step in trace.of(ScalerStep):
            scaler = step.scaler
            if isinstance(scaler, Scaler) and scaler.path and "Sharded" not in scaler.path:
                yield _mistake(scaler, code.module.imports.names.get("torch") == "torch")


def _mistake(scaler: Scaler, has_torch: bool) -> Mistake:
    edits = ()
    if isinstance(scaler.node, ast.Call) and has_torch and not scaler.node.args[1:]:
        new = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        edits = (edit("replace", scaler.node.func, new),)
    return Mistake(
        scaler.node,
        scaler.module,
        "a plain GradScaler under FSDP sees only this rank's shards: when one rank overflows the "
        "others step, and ranks train different models; use "
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        edits,
    )
