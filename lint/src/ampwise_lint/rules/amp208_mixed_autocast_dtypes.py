"""# mixed-autocast-dtypes

## What it does
Reports an autocast region in another low dtype than an earlier one of the same training step,
nested or side by side. Silent for regions without gradients and for islands with autocast off.

## Why is this bad
Values are rounded to both formats: bfloat16 keeps 8 bits, and float16 ends at 65504, so a
bfloat16 activation of 1e5 is inf in the float16 part. Only the float16 part needs the loss
scale.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        code = encoder(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(decoder(code), y)

## Use instead
    with torch.autocast("cuda", dtype=torch.bfloat16):
        code = encoder(x)
        loss = criterion(decoder(code), y)

## Fix safety
No automatic fix: which of the two dtypes is meant, only the author knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.events import Backward, Enter


@rule("AMP208", "mixed-autocast-dtypes", "warning", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        if not trace.of(Backward):
            continue
        first: dict[int, Enter] = {}
        for event in trace.of(Enter):
            if event.region.dtype is None or not event.context.loops or event.context.no_grad:
                continue
            serial = event.context.loops[-1].serial
            other = first.setdefault(serial, event)
            if (
                other.region.dtype != event.region.dtype
                and other.region.device == event.region.device
            ):
                yield Mistake(
                    event.node,
                    event.module,
                    f"one step runs autocast in {other.region.dtype} (line {other.node.lineno}) "
                    f"and in {event.region.dtype}: values are rounded to both formats, and the "
                    "loss scale fits only one of them; use one dtype",
                )
