"""# unprotected-exp

## What it does
Reports exp, pow, square, reciprocal and products of a tensor with itself that run in float16.
Under CUDA autocast exp, pow, reciprocal and rsqrt are on the float32 list and not reported; `x
* x` and `square` are not on it, and with autocast off nothing is cast.

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

from collections.abc import Iterator

from ampwise_lint.model.analysis import Analysis
from ampwise_lint.model.events import Op
from ampwise_lint.model.tensors import is_low, origins
from ampwise_lint.model.values import Const, Tensor, key_of
from ampwise_lint.rule import Mistake, rule

GROWING = {"exp", "exp_", "pow", "pow_", "reciprocal", "square", "square_", "rsqrt", "expm1"}


@rule("AMP213", "unprotected-exp", "warning")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Op):
            if _overflows(event) and not _is_penalty(event):
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


def _is_square(event: Op) -> bool:
    one, other = event.inputs
    return one is other or (bool(key_of(one)) and key_of(one) == key_of(other))


def _is_penalty(event: Op) -> bool:
    """Whether it belongs to a gradient penalty behind autocast: that is AMP116's."""
    first = event.inputs[0]
    return (
        event.context.region is None
        and isinstance(first, Tensor)
        and any(each.op == "autograd.grad" for each in origins(first))
    )
