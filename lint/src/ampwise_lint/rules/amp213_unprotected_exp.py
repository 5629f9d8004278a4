"""# unprotected-exp

## What it does
Reports exp, pow, square, reciprocal and products of a tensor with itself that run in float16.
Under CUDA autocast exp, pow, reciprocal and rsqrt are on the float32 list and not reported; `x
* x` and `square` are not on it, and with autocast off nothing is cast. Also `1 + x` of 16 bits from
which `x.exp()` is taken away, as in the KL divergence of a VAE. Silent for what a clamp, or a
sigmoid or tanh, has bounded so that nothing overflows.

## Why is this bad
In float16, 256 squared is inf, exp overflows above 11.09 and 1 / 1e-5 is inf; the square of
1e-4 is 0. Nothing raises: a norm gives zeros, a variance is 0 or negative, and the loss is NaN
some layers later.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x)
        power = (hidden * hidden).mean(dim=-1, keepdim=True)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x).float()
        power = (hidden * hidden).mean(dim=-1, keepdim=True)

## Fix safety
No automatic fix: how far the float32 part has to reach depends on what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.precision import losses_by_hand
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Const, Tensor, Value, is_low, key_of
from ampwise_lint.values.contents import origins
from ampwise_lint.values.events import Op

GROWING = {"exp", "exp_", "pow", "pow_", "reciprocal", "square", "square_", "rsqrt", "expm1"}


@rule("AMP213", "unprotected-exp", "warning", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        elsewhere = {id(each.node) for each in losses_by_hand(trace)}  # AMP202's
        for event in trace.of(Op):
            if _cancels(event, trace):
                yield Mistake(
                    event.node,
                    event.module,
                    "1 plus a 16-bit number keeps 11 bits (8 in bfloat16), from which its exp is "
                    "taken away again: near 0 the divergence is noise, and may be negative; cast "
                    "up first (x.float())",
                )
            elif id(event.node) in elsewhere:
                continue
            elif _overflows(event) and not _is_penalty(event) and not _fits(event, trace):
                yield Mistake(
                    event.node,
                    event.module,
                    f"{event.path} runs in float16 here: a square overflows above 255, exp above "
                    "11, and small results vanish; cast the input up first (x.float()), and back "
                    "if needed",
                )


def _overflows(event: Op) -> bool:
    if not event.inputs or not isinstance(event.inputs[0], Tensor):
        return False
    first = event.inputs[0]
    result = event.result
    if not (isinstance(result, Tensor) and first.dtype == "float16" and is_low(result.dtype)):
        return False
    if event.path in GROWING:
        power = event.inputs[1] if len(event.inputs) > 1 else None
        if isinstance(power, Const) and isinstance(power.value, int | float):
            return abs(power.value) > 1
        return True
    return event.path == "mul" and len(event.inputs) == 2 and _is_square(event)


LARGEST = 65_504.0
AT_MOST_1 = ("sigmoid", "tanh", "softmax", "sin", "cos")


def _fits(event: Op, trace: Trace) -> bool:
    """Whether what it is computed of is bounded so that nothing can overflow."""
    limit = _limit(event.inputs[0], trace)
    power = event.inputs[1] if event.path.startswith("pow") and len(event.inputs) > 1 else None
    match event.path, power:
        case (("exp" | "exp_" | "expm1"), _):
            return limit <= math.log(LARGEST)
        case (("mul" | "square" | "square_"), _):
            return limit**2 <= LARGEST
        case _, Const(value=int() | float() as number) if number > 0:
            return limit <= LARGEST ** (1 / number)
        case _:
            return False


def _limit(value: Value, trace: Trace) -> float:
    """What every element is at most, without its sign."""
    if not isinstance(value, Tensor):
        return math.inf
    if value.op in AT_MOST_1:
        return 1.0
    if value.op not in ("clamp", "clip"):
        return math.inf
    made = next((each for each in trace.of(Op) if each.result is value), None)
    named = (
        [made.arguments[name] for name in ("min", "max") if name in made.arguments] if made else []
    )
    bounds = [each.value for each in (*value.inputs[1:], *named) if isinstance(each, Const)]
    numbers = [abs(each) for each in bounds if isinstance(each, int | float)]
    return max(numbers) if len(numbers) == 2 else math.inf


def _cancels(event: Op, trace: Trace) -> bool:
    """``1 + x - mu ** 2 - x.exp()``: the sum is rounded to 16 bits, exp is not."""
    if event.path != "add" or event.context.region is None or len(event.inputs) != 2:
        return False
    one, x = event.inputs if isinstance(event.inputs[0], Const) else reversed(event.inputs)
    if not (isinstance(one, Const) and one.value == 1 and isinstance(x, Tensor)):
        return False
    if not (is_low(x.dtype) and isinstance(event.result, Tensor) and is_low(event.result.dtype)):
        return False
    statement = event.module.statement_of(event.node)
    return any(
        each.path == "exp"
        and _is_same(each.inputs[0], x)
        and event.module.holds(each.node)
        and event.module.statement_of(each.node) is statement
        for each in trace.of(Op)
    )


def _is_square(event: Op) -> bool:
    return _is_same(event.inputs[0], event.inputs[1])


DEEP = 6
"""Operations back that two values are compared."""


def _is_same(one: Value, other: Value, deep: int = DEEP) -> bool:
    """Whether two values are the same, or the same multiple of one."""
    if one is other:
        return True
    if deep == 0 or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(key_of(one)) and key_of(one) == key_of(other)
    # What a function computes has one key, whatever it is given in two calls.
    same = one.key == other.key or one.op == other.op == "mul"
    pairs = zip(one.inputs, other.inputs, strict=False)
    same = same and len(one.inputs) == len(other.inputs)
    return same and all(_is_same(first, second, deep - 1) for first, second in pairs)


def _is_penalty(event: Op) -> bool:
    """Whether it belongs to a gradient penalty behind autocast: that is AMP116's."""
    first = event.inputs[0]
    return (
        event.context.region is None
        and isinstance(first, Tensor)
        and any(each.op == "autograd.grad" for each in origins(first))
    )
