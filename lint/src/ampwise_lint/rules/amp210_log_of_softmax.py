"""# log-of-softmax

## What it does
Reports `log(softmax(x))`, `log(sigmoid(x))` and `log(exp(x).sum())`, in one expression or over
several lines, in files that use 16-bit precision. Silent where logits or probabilities are clamped
before.

## Why is this bad
A probability that is too small is 0 first and -inf behind the logarithm: in float16
log(softmax([-20, 0])) gives -inf with gradients of NaN, where `log_softmax` gives -20. exp(12)
is inf in float16. In float32 the same happens at -110.

## Example
    log_p = torch.log(F.softmax(logits, dim=-1))
    log_q = torch.log(torch.sigmoid(margin))
    z = torch.log(energy.exp().sum(dim=-1))

## Use instead
    log_p = F.log_softmax(logits, dim=-1)
    log_q = F.logsigmoid(margin)
    z = torch.logsumexp(energy, dim=-1)

## Fix safety
Safe for softmax and sigmoid in one expression: `--fix` writes `log_softmax` or `logsigmoid`,
the same function to rounding, and finite where it was not. Other forms are reported and not
fixed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.precision import uses_half
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Tensor, Value
from ampwise_lint.values.contents import origins
from ampwise_lint.values.events import Op

BETTER = {"softmax": "log_softmax", "sigmoid": "logsigmoid"}


@rule("AMP210", "log-of-softmax", "warning", fix="safe", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_half(code):
        return
    for event in code.of(Op):
        if event.path != "log" or not event.inputs or _is_ranked(event):
            continue
        if inner := _inner(event.inputs[0]):
            better = BETTER.get(inner, "logsumexp")
            yield Mistake(
                event.node,
                event.module,
                f"log of {'exp and sum' if inner == 'sum' else inner}: a probability too small for "
                f"the format is 0 first and -inf then, and so is its gradient; use {better}, which "
                "never leaves the logarithm",
                _edits(event.node, inner),
            )


def _is_ranked(event: Op) -> bool:
    """``x.softmax(-1).log().argmax(-1)``: which is largest is the same without the logarithm."""
    around = event.module.parents.get(id(event.node))
    return isinstance(around, ast.Attribute) and around.attr in ("argmax", "argsort")


def _inner(value: Value) -> str:
    """The operation below the logarithm that makes it lossy; empty if none."""
    if not isinstance(value, Tensor):
        return ""
    if value.op in BETTER:
        return "" if _is_bounded(value) else value.op
    if value.op == "sum" and value.inputs:
        first = value.inputs[0]
        is_bare = isinstance(first, Tensor) and _is_bare_exp(first) and not _is_bounded(first)
        return "sum" if is_bare else ""
    return ""


BOUNDS = ("clamp", "clip", "hardtanh", "tanh")


def _is_bounded(value: Tensor) -> bool:
    """Whether what it is computed of was clamped: nothing in it comes near 0 then."""
    first = next(iter(value.inputs), None)
    return isinstance(first, Tensor) and first.op in BOUNDS


def _is_bare_exp(value: Tensor) -> bool:
    """Whether it is exp of something its maximum was not taken off: that sum is at least 1."""
    shifted = value.inputs[0] if value.op == "exp" and value.inputs else None
    if not isinstance(shifted, Tensor) or shifted.op != "sub" or len(shifted.inputs) < 2:
        return value.op == "exp"
    shift = shifted.inputs[1]
    return not (isinstance(shift, Tensor) and any(e.op in ("max", "amax") for e in origins(shift)))


def _edits(node: Node, inner: str) -> tuple[Edit, ...]:
    """``torch.log(F.softmax(x, dim=1))`` in one expression becomes ``F.log_softmax(x, dim=1)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ()
    if inner not in BETTER:
        return ()
    below = node.args[0] if node.args else node.func.value
    if not isinstance(below, ast.Call) or not isinstance(below.func, ast.Attribute):
        return ()
    home = ast.unparse(below.func.value)
    if inner == "softmax" and below.func.attr == "softmax":
        rest = ast.unparse(below).partition("(")[2]
        return (edit("replace", node, f"{home}.log_softmax({rest}"),)
    if inner == "sigmoid" and below.func.attr == "sigmoid":
        argument = ast.unparse(below.args[0]) if below.args else home
        return (edit("replace", node, f"torch.nn.functional.logsigmoid({argument})"),)
    return ()
