"""# mask-constant-overflow

## What it does
Reports a constant beyond 65504, such as -1e9, that is filled into a float16 tensor: by
`masked_fill`, `where`, `full_like` or assignment to a mask.

## Why is this bad
`masked_fill` and `full_like` raise RuntimeError "value cannot be converted to type c10::Half
without overflow"; `where` and assignment give -inf, and a row that is masked throughout becomes
NaN in softmax. bfloat16 holds -1e9.

## Example
    scores = q @ k.transpose(-2, -1)
    scores = scores.masked_fill(mask, -1e9)
    weights = scores.softmax(dim=-1)

## Use instead
    scores = q @ k.transpose(-2, -1)
    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)

## Fix safety
Unsafe: `--unsafe-fixes` writes `torch.finfo(x.dtype).min` in `x.masked_fill(mask, ...)`. In rows
that are masked throughout the two constants give different weights.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.lint.findings import Edit
from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Op
from ampwise.lint.model.queries import edit, receiver
from ampwise.lint.model.values import Const, Tensor, Value
from ampwise.lint.rule import Mistake, rule

FLOAT16_MAX = 65504.0
FILLS = {"masked_fill": 2, "masked_fill_": 2, "where": 2, "setitem": 2, "full_like": 1}


@rule("AMP212", "mask-constant-overflow", "error", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Op):
            if event.path in FILLS and (value := _constant(event)) and _is_half(event):
                yield Mistake(
                    event.node,
                    event.module,
                    f"{value:g} does not fit into float16, which ends at 65,504: filling with it "
                    "raises RuntimeError or gives -inf; use torch.finfo(x.dtype).min, or a "
                    "boolean mask",
                    _edits(event, value),
                )


def _edits(event: Op, value: float) -> tuple[Edit, ...]:
    """``x.masked_fill(mask, -1e9)`` becomes ``x.masked_fill(mask, torch.finfo(x.dtype).min)``."""
    node = event.node
    if value > 0 or not event.path.startswith("masked_fill") or not isinstance(node, ast.Call):
        return ()
    owner = receiver(node)
    if owner and len(node.args) == 2:
        return (edit("replace", node.args[1], f"torch.finfo({owner}.dtype).min"),)
    return ()


def _constant(event: Op) -> float | None:
    values: list[Value] = [*event.inputs, *event.arguments.values()]
    for each in values:
        if isinstance(each, Const) and isinstance(each.value, int | float):
            size = abs(each.value)
            if FLOAT16_MAX < size < float("inf"):
                return float(each.value)
    return None


def _is_half(event: Op) -> bool:
    tensors = [each for each in event.inputs if isinstance(each, Tensor)]
    return any(each.dtype == "float16" for each in tensors)
