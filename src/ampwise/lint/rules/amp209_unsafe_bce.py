"""# unsafe-bce

## What it does
Reports `binary_cross_entropy` or `BCELoss` inside autocast. Silent for CPU autocast, which runs
it in float32.

## Why is this bad
CUDA autocast raises: "binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast." A
sigmoid in float16 is 1 for a logit of 10, so the loss of a wrong answer is 100 (where torch
clamps its logarithm) in place of 10.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        probability = torch.sigmoid(model(x))
        loss = F.binary_cross_entropy(probability, y)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, y)

## Fix safety
No automatic fix: the sigmoid may be part of the network, and its output be used elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Op
from ampwise.lint.rule import Mistake, rule


@rule("AMP209", "unsafe-bce", "error", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Op):
            region = event.context.region
            if event.path != "binary_cross_entropy" or region is None or region.device == "cpu":
                continue
            yield Mistake(
                event.node,
                event.module,
                "binary_cross_entropy (BCELoss) raises RuntimeError under CUDA autocast: in "
                "float16 the logarithm of a probability near 0 or 1 is lost; leave the sigmoid out "
                "and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)",
            )
