"""# mask-constant-overflow

## What it does
Reports a constant beyond 65504, such as -1e9, that is filled into a float16 tensor: by
`masked_fill`, `where`, `full_like`, assignment to a mask, `+=` of a mask times the constant, or a
float16 mask times it.
A warning in networks that a float16 training imports and nothing in sight runs, as those that a
registry or a name chooses.

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
Unsafe: `--unsafe-fixes` writes `torch.finfo(x.dtype).min` in `x.masked_fill(mask, ...)`,
`torch.where(mask, x, ...)` and `x[mask] = ...`, where the tensor has a name. In rows that are
masked throughout the two constants give different weights.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit, receiver
from ampwise_lint.queries.precision import with_networks
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import has_torch
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Const, Tensor, Unknown, Value
from ampwise_lint.values.events import Op

FLOAT16_MAX = 65504.0
FILLS = {"masked_fill": 2, "masked_fill_": 2, "where": 2, "setitem": 2, "full_like": 1}


@rule("AMP212", "mask-constant-overflow", "error", fix="unsafe", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace, unseen in with_networks(code):
        for event in trace.of(Op):
            if event.path in FILLS and (value := _constant(event.inputs, event.arguments)):
                filled = _is_half(event)
            else:
                value = _added(event) or _multiplied(event)
                filled = value is not None
            if filled and value is not None:
                yield Mistake(
                    event.node,
                    event.module,
                    f"{value:g} does not fit into float16, which ends at 65,504: filling with it "
                    "raises RuntimeError or gives -inf; use torch.finfo(x.dtype).min, or a "
                    f"boolean mask{unseen}",
                    _edits(event, value),
                    severity="warning" if unseen else None,
                )


def _edits(event: Op, value: float) -> tuple[Edit, ...]:
    """``x.masked_fill(mask, -1e9)`` becomes ``x.masked_fill(mask, torch.finfo(x.dtype).min)``."""
    owner, constant = _filled(event)
    if not owner or constant is None or not has_torch(event.module):
        return ()
    end = "min" if value < 0 else "max"
    return (edit("replace", constant, f"torch.finfo({owner}.dtype).{end}"),)


def _filled(event: Op) -> tuple[str, ast.expr | None]:
    """The name of the tensor, and the constant that goes into it."""
    node = event.node
    statement = event.module.statement_of(node)
    match node:
        case ast.Call(args=[_, constant]) if event.path.startswith("masked_fill"):
            return receiver(node), constant
        case ast.Call(args=[_], keywords=[ast.keyword(arg="value", value=constant)]):
            return receiver(node), constant
        case ast.Call(args=[_, kept, filled]) if event.path == "where":
            first_is_constant = isinstance(kept, ast.Constant | ast.UnaryOp)
            return (dotted(filled), kept) if first_is_constant else (dotted(kept), filled)
        case ast.Subscript(value=owner) if isinstance(statement, ast.Assign):
            return dotted(owner), statement.value
        case _:
            return "", None


def _added(event: Op) -> float | None:
    """The constant in ``scores += (1 - mask) * -1e9``: in place the sum stays float16."""
    node = event.node
    if not isinstance(node, ast.AugAssign) or event.path not in ("add", "sub"):
        return None
    first, other = event.inputs
    if not isinstance(first, Tensor) or first.dtype != "float16":
        return None
    if "mask" not in event.module.unparsed(node.value).lower():
        return None
    match other:
        case Tensor(op="mul", inputs=factors) | Unknown(op="mul", operands=factors):
            return _constant(factors, {})
        case _:
            return None


def _multiplied(event: Op) -> float | None:
    """The constant in ``(1 - mask) * -1e9``, where the mask is float16."""
    if event.path != "mul" or not _is_half(event):
        return None
    inside = isinstance(event.module.statement_of(event.node), ast.AugAssign)
    if inside or "mask" not in event.module.unparsed(event.node).lower():
        return None
    return _constant(event.inputs, {})


def _constant(inputs: Sequence[Value], arguments: Mapping[str, Value]) -> float | None:
    for each in (*inputs, *arguments.values()):
        if isinstance(each, Const) and isinstance(each.value, int | float):
            size = abs(each.value)
            if FLOAT16_MAX < size < float("inf"):
                return float(each.value)
    return None


def _is_half(event: Op) -> bool:
    """Whether what is filled is float16; of the mask that does not matter."""
    masked = event.path.startswith("masked_fill")
    filled = event.inputs[:1] if masked else event.inputs[event.path == "where" :]
    return any(isinstance(each, Tensor) and each.dtype == "float16" for each in filled)
