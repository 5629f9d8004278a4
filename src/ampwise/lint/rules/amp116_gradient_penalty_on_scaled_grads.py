"""# gradient-penalty-on-scaled-grads

## What it does
Reports `torch.autograd.grad` of a scaled loss or output whose result is used without dividing
it by the scale. Silent for gradients of outputs that were not scaled.

## Why is this bad
The penalty is computed of gradients that are multiplied by the scale: a squared norm is 65536
squared, 4.3e9 times too large, and swamps the loss. It also changes whenever the scale does, so
the weight of the penalty is never the one that was set.

## Example
    grads = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    penalty = sum(g.square().sum() for g in grads)
    scaler.scale(loss + penalty).backward()

## Use instead
    grads = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    inverse = 1.0 / scaler.get_scale()
    grads = [g * inverse for g in grads]
    penalty = sum(g.square().sum() for g in grads)
    scaler.scale(loss + penalty).backward()

## Fix safety
No automatic fix: the gradients may be used in several places, and penalty weights have to be
tuned again.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Grad, Op
from ampwise.lint.model.values import Tensor, Unknown
from ampwise.lint.rule import Mistake, rule


@rule("AMP116", "gradient-penalty-on-scaled-grads", "error")
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Grad):
            if event.result.grad_scaled and not any(
                _unscales(op, event.result) for op in trace.of(Op)
            ):
                yield Mistake(
                    event.node,
                    event.module,
                    "gradients of a scaled output are used as they are: the penalty is computed of "
                    "values up to 65,536 times too large; multiply them by 1 / scaler.get_scale() "
                    "before using them",
                )


def _unscales(op: Op, result: Tensor) -> bool:
    """Whether an operation divides the gradients by the scale."""
    if op.path not in ("mul", "div"):
        return False
    by_scale = any(isinstance(each, Unknown) and each.scale for each in op.inputs)
    return by_scale and any(
        isinstance(each, Tensor) and (each is result or each.key == result.key or each.grad_scaled)
        for each in op.inputs
    )
