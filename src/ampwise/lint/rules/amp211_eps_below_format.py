"""# eps-below-format

## What it does
Reports a literal epsilon that is added to, or clamps, a tensor of a 16-bit dtype in which it is
0: below 3e-8 in float16.

## Why is this bad
1e-8 and 1e-12 are 0 in float16, so they protect nothing: 0 / (0 + 1e-8) is NaN and
`clamp(min=1e-8)` of 0 stays 0. bfloat16 holds both numbers.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x)
        hidden = hidden / (hidden.abs().amax(-1, keepdim=True) + 1e-8)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = layer(x).float()
        hidden = hidden / (hidden.abs().amax(-1, keepdim=True) + 1e-8)

## Fix safety
No automatic fix: a larger epsilon changes results, and float32 takes more memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Op
from ampwise.lint.model.values import Const, Tensor, Value
from ampwise.lint.rule import Mistake, rule

ZERO_BELOW = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest number: what is smaller becomes zero."""
HELD = {"float16": "6e-8 at least, 1e-4 to be safe", "bfloat16": "1e-30"}
GUARDS = ("add", "sub", "clamp", "clamp_min", "clip", "maximum", "add_", "clamp_")


@rule("AMP211", "eps-below-format", "warning", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Op):
            if event.path in GUARDS and (found := _lost(event)):
                eps, dtype = found
                yield Mistake(
                    event.node,
                    event.module,
                    f"{eps:g} is 0 in {dtype}: it protects nothing, and what follows divides by "
                    "zero or takes the logarithm of it; compute in float32 (.float()), or use an "
                    f"epsilon the format holds ({HELD[dtype]})",
                )


def _lost(event: Op) -> tuple[float, str] | None:
    tensors = [each for each in event.inputs if isinstance(each, Tensor)]
    if not tensors or tensors[0].dtype not in ZERO_BELOW or tensors[0].guessed:
        return None
    dtype = tensors[0].dtype
    values: list[Value] = [*event.inputs, *event.arguments.values()]
    for each in values:
        if isinstance(each, Const) and isinstance(each.value, float):
            size = abs(each.value)
            if 0 < size < ZERO_BELOW[dtype]:
                return each.value, dtype
    return None
