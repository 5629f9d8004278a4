"""# unfused-optimizer

## What it does
Reports Adam, AdamW, SGD or Adagrad of `torch.optim` without `fused`, when a scaler steps it, or a
wrapper that holds one, as timm's `NativeScaler` does. An explicit `fused` or `foreach` is a choice,
and not reported; nor is what only a smoke test or a dry run steps.

## Why is this bad
For an optimizer that is not fused, `scaler.step` unscales in a pass of its own and reads
found_inf with `.item()`: a host sync per optimizer and device on every step. A fused one does
both in its kernel, without a sync. On a 2-core CPU the usual step with AdamW over 20 M
parameters took 82 ms, fused 27 ms.

## Example
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Unsafe: `--unsafe-fixes` adds `fused=True`. A checkpoint of the unfused optimizer undoes it:
`load_state_dict` puts back the `fused=None` that was saved, and the scaler's step then raises an
AssertionError; set `group["fused"] = True` in each of the checkpoint's `param_groups` before it is
loaded. Results differ in rounding; a skipped step still calls Python's `optimizer.step()`; and with
ShardedGradScaler a fused optimizer skips the all-reduce of found_inf. Where an option names the
class, nothing is added: not each is fused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.branches import is_trial
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.steps import steps_by_scaler
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Optimizer
from ampwise_lint.values.events import ScalerStep

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


@rule("AMP305", "unfused-optimizer", "info", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in steps_by_scaler(trace):
            optimizer = event.optimizer
            # The sharded scaler skips the all-reduce of found_inf for fused optimizers.
            sharded = isinstance(event, ScalerStep) and "Sharded" in event.scaler.path
            if isinstance(optimizer, Optimizer) and not sharded and not is_trial(event):
                for each in (optimizer, *optimizer.others):
                    if _could_be_fused(each):
                        yield _mistake(each)


def _could_be_fused(optimizer: Optimizer) -> bool:
    home, _, name = optimizer.path.rpartition(".")
    if not home.startswith("torch.optim") or home.endswith("._multi_tensor"):
        return False  # the old name of what `foreach` asks for
    says = {"fused", "foreach", "capturable", "**", "differentiable"}
    return name in FUSED and not optimizer.arguments.keys() & says


def _mistake(optimizer: Optimizer) -> Mistake:
    return Mistake(
        optimizer.node,
        optimizer.module,
        "the optimizer is not fused: under a scaler each step copies found_inf to the host and "
        "passes over the gradients several times; add fused=True",
        (edit("argument", optimizer.node, "fused=True"),) if _is_named(optimizer) else (),
    )


def _is_named(optimizer: Optimizer) -> bool:
    """Whether its class stands in the file: of all that an option may name, some are not fused."""
    made = ast.unparse(getattr(optimizer.node, "func", optimizer.node))
    return not made.startswith("getattr(") and "__dict__" not in made and "vars(" not in made
