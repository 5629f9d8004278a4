"""# metrics-in-half

## What it does
Reports a running sum over batches that is kept in float16 or bfloat16: made in that dtype, or
begun at 0 with 16-bit values added. Silent for losses that a network returns: autocast computes
those in float32.

## Why is this bad
Adding 1 stops counting at 256 in bfloat16 and at 2048 in float16 (measured): the next number is
two further on, and the sum rounds back. An accuracy over 10,000 samples comes out wrong,
without a word.

## Example
    correct = torch.zeros((), device="cuda", dtype=torch.bfloat16)
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum()

## Use instead
    correct = torch.zeros((), device="cuda")
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum()

## Fix safety
Unsafe: `--unsafe-fixes` adds in float32 where the sum is a Python number; a sum that is a half
tensor itself has to be made anew by the author. The figure changes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.steps import step_loops
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Const, Tensor, Value, is_low
from ampwise_lint.values.events import Accumulate, Loop


@rule("AMP217", "metrics-in-half", "warning", fix="unsafe", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    steps = step_loops(code).nodes
    for trace in code.traces:
        for event in trace.of(Accumulate):
            into, added = event.into, event.added
            begun = _begun(into)
            around = [each for each in event.context.loops if each.serial > begun]
            if not any(_is_over_data(each, steps) for each in around):
                continue
            if _is_half_sum(into, added):
                yield Mistake(
                    event.node,
                    event.module,
                    "a running sum is kept in half precision: adding 1 stops counting at 256 in "
                    "bfloat16 and 2,048 in float16, and small values are lost sooner; add up in "
                    "float32 (value.float()), or in Python numbers",
                    _edits(event),
                )


def _is_over_data(loop: Loop, steps: set[int]) -> bool:
    """Whether a loop runs over batches; a ``while`` does where steps are made in it."""
    return loop.over_data or (isinstance(loop.node, ast.While) and id(loop.node) in steps)


def _begun(into: Value) -> int:
    """Serial number of the iteration in which a sum was made; 0 outside loops.

    What is made and added to within one batch is no sum over batches.
    """
    serial = into.key.rpartition("#")[2] if isinstance(into, Tensor) else ""
    return int(serial) if serial.isdigit() else 0


def _edits(event: Accumulate) -> tuple[Edit, ...]:
    node = event.node
    if not isinstance(node, ast.AugAssign) or isinstance(event.into, Tensor):
        return ()  # the sum itself is half: its making must change
    text = event.module.text_of(node.value)
    plain = isinstance(node.value, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return (edit("replace", node.value, f"{text if plain else f'({text})'}.float()"),)


def _is_half_sum(into: object, added: object) -> bool:
    if (
        isinstance(into, Tensor)
        and not into.host
        and into.op in ("zeros", "zeros_like", "tensor", "full", "add")
    ):
        if isinstance(added, Tensor) and not added.host and added.dtype == "float32":
            return False  # of two tensors with dimensions the wider one decides
        return is_low(into.dtype)
    if isinstance(into, Const) and into.value == 0:
        return (
            isinstance(added, Tensor)
            and not added.host
            and is_low(added.dtype)
            and added.op in ("sum", "mean", "add")
        )
    return False
