"""# eps-below-format

## What it does
Reports a literal that is to keep a tensor of a 16-bit dtype away from 0 or 1, and does not: an
epsilon that is 0 in the dtype (below 3e-8 in float16); one that is absorbed, because what it is
added to is surely too large (`1 + 1e-4`); and a bound such as `1 - 1e-6`, which the dtype rounds
to 1. An epsilon is only called absorbed where the other term is at least some number whatever
the data: ones, constants, a clamp, a constant plus what is never negative. Also in networks that a
float16 training imports and nothing in sight runs, as those that a registry or a name chooses.

## Why is this bad
1e-8 and 1e-12 are 0 in float16, so they protect nothing: 0 / (0 + 1e-8) is NaN and
`clamp(min=1e-8)` of 0 stays 0. bfloat16 holds both numbers. At 1 the gap to the next number is
9.8e-4 in float16 and 7.8e-3 in bfloat16, and less than half of it is lost in a sum; just below 1
it is half as wide, so `p.clamp(max=1 - 1e-4)` leaves 1 as it is, and log(1 - p) is -inf.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x)
        hidden = hidden / (hidden.abs().amax(-1, keepdim=True) + 1e-8)
        log_q = torch.log(1 - hidden.sigmoid().clamp(max=1 - 1e-4))

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x)
        hidden = hidden / (hidden.abs().amax(-1, keepdim=True).float() + 1e-8)
        log_q = torch.log(1 - hidden.sigmoid().float().clamp(max=1 - 1e-4))

## Fix safety
Unsafe: `--unsafe-fixes` casts the tensor up where the epsilon meets it, so that the epsilon is what
it says; the result is float32 and takes twice the memory. What was rounded before stays rounded. A
larger epsilon would change results; which one, only the author knows. No fix for operations in
place, whose tensor keeps its dtype.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from functools import partial

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.precision import with_networks
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import grouped
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Const, Tensor, Value
from ampwise_lint.values.contents import origins
from ampwise_lint.values.events import Op

ZERO_BELOW = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest number: what is smaller becomes zero."""
MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
HELD = {"float16": "6e-8 at least, 1e-4 to be safe", "bfloat16": "1e-30"}
GUARDS = ("add", "sub", "clamp", "clamp_min", "clip", "maximum", "add_", "clamp_")
UPPER = {"clamp": 2, "clip": 2, "clamp_": 2, "clamp_max": 1}
"""Where the upper bound stands among the inputs, if it is not given as ``max``."""


@rule("AMP211", "eps-below-format", "warning", fix="unsafe", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace, unseen in with_networks(code):
        for event in trace.of(Op):
            message = _zero(event) or _absorbed(event) or _bound_at_one(event)
            if message:
                mend = partial(_edits, event.module, event.node)
                yield Mistake(event.node, event.module, message + unseen, mend=mend)


def _zero(event: Op) -> str:
    dtype = _dtype(event)
    if event.path not in GUARDS or dtype is None:
        return ""
    for each in (*event.inputs, *event.arguments.values()):
        eps = _number(each)
        if isinstance(eps, float) and 0 < abs(eps) < ZERO_BELOW[dtype]:
            return (
                f"{eps:g} is 0 in {dtype}: it protects nothing, and what follows divides by zero "
                "or takes the logarithm of it; compute in float32 (.float()), or use an epsilon "
                f"the format holds ({HELD[dtype]})"
            )
    return ""


def _dtype(event: Op) -> str | None:
    """The 16-bit dtype of the tensor an operation is of, if it is one.

    What a network that is not in sight returns may be a softmax, which is float32; what a sigmoid
    is taken of are logits, which layers return.
    """
    first = next((each for each in event.inputs if isinstance(each, Tensor)), None)
    if first is None:
        return None
    if first.dtype in ZERO_BELOW:
        return first.dtype if not first.guessed or _is_of_logits(first) else None
    region = first.region
    open_dtype = first.dtype is None and region is not None and region.device != "cpu"
    low = region.dtype if region is not None and region.enabled else None
    return low if open_dtype and low in ZERO_BELOW and _is_of_logits(first) else None


def _is_of_logits(tensor: Tensor) -> bool:
    """Whether a tensor was computed of the sigmoid of what a network returned, and of no labels.

    Labels of float32 make float32 of what they are multiplied with.
    """
    found = list(origins(tensor))
    return any(each.op == "sigmoid" for each in found) and not any(each.data for each in found)


def _number(value: Value | None) -> float | None:
    number = value.value if isinstance(value, Const) else None
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


# ---------------------------------------------------------------------- absorbed


def _absorbed(event: Op) -> str:
    """A literal added to a tensor none of whose elements can be changed by it."""
    dtype = _dtype(event)
    if event.path not in ("add", "sub") or dtype is None or len(event.inputs) != 2:
        return ""
    tensor = next(each for each in event.inputs if isinstance(each, Tensor))
    eps = next((e for each in event.inputs if (e := _number(each)) is not None), 0.0)
    size = least(tensor)
    if not eps or size <= 0 or (isinstance(event.inputs[0], Const) and event.path == "sub"):
        return ""
    gap = 2.0 ** (math.floor(math.log2(size)) - MANTISSA_BITS[dtype])
    grows = (event.path == "add") == (eps > 0)
    # Below a power of two numbers lie twice as close; a sum that is half a gap away may round up.
    if abs(eps) < gap / (2 if grows else 4):
        return (
            f"{eps:g} is absorbed: what it is added to is {size:g} or more, where numbers of "
            f"{dtype} lie {gap:.2g} apart, so nothing changes; compute in float32 (.float())"
        )
    return ""


NEVER_NEGATIVE = (
    "relu",
    "abs",
    "square",
    "sigmoid",
    "softmax",
    "exp",
    "sqrt",
    "var",
    "std",
    "softplus",
)


def least(value: Value) -> float:
    """What every element of a tensor is at least, whatever the data; -inf where that is open."""
    number = _number(value)
    if number is not None:
        return float(number)
    if not isinstance(value, Tensor):
        return -math.inf
    inputs = value.inputs
    match value.op, inputs:
        case (("ones" | "ones_like"), _):
            return 1.0
        case (("full" | "full_like"), (_, filler, *_)):
            return least(filler)
        case "add", (left, right):
            return least(left) + least(right)
        case "mul", (left, right) if least(left) >= 0 and least(right) >= 0:
            return least(left) * least(right)
        case (("clamp_min" | "maximum"), (left, right, *_)):
            return max(least(left), least(right))
        case (("clamp" | "clip"), (left, low)) if _number(low) is not None:
            return max(least(left), least(low))
        case op, _ if op in NEVER_NEGATIVE:
            return 0.0
        case _:
            return -math.inf


def _bound_at_one(event: Op) -> str:
    """An upper bound just below 1 that the dtype rounds to 1."""
    dtype = _dtype(event)
    if event.path not in UPPER or dtype is None:
        return ""
    index = UPPER[event.path]
    given = event.inputs[index] if len(event.inputs) > index else None
    bound = _number(event.arguments.get("max", given))
    if bound is not None and 0 < 1 - bound < 2.0 ** -(MANTISSA_BITS[dtype] + 2):
        return (
            f"the bound {bound:.10g} is 1 in {dtype}, whose next number below is "
            f"{1 - 2.0 ** -(MANTISSA_BITS[dtype] + 1):.4g}: what is 1 stays 1, and what is left of "
            "it is 0, with a logarithm of -inf; compute in float32 (.float())"
        )
    return ""


# ---------------------------------------------------------------------- fixes


def _edits(module: Module, node: Node) -> tuple[Edit, ...]:
    """Cast the tensor up where the literal meets it."""
    tensor: ast.expr | None = None
    match node:
        case ast.BinOp(left=left, right=right):
            tensor = right if _is_literal(left) else left
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if not name.endswith("_"):
            is_torch = module.imports.full(node.func).startswith("torch.")
            tensor = next(iter(node.args), None) if is_torch else owner
        case _:
            pass
    if tensor is None:
        return ()
    return (edit("replace", tensor, f"{grouped(module, tensor)}.float()"),)


def _is_literal(node: ast.expr) -> bool:
    return all(
        isinstance(e, ast.Constant | ast.operator | ast.unaryop | ast.BinOp | ast.UnaryOp)
        for e in ast.walk(node)
    )
