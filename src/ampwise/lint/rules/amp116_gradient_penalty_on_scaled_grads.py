"""# gradient-penalty-on-scaled-grads

## What it does
Reports `torch.autograd.grad` of a scaled loss or output whose result is used without dividing
it by the scale. Silent for gradients of outputs that were not scaled. Also reports a penalty that
is computed of 16-bit gradients (`create_graph=True`, with respect to a 16-bit activation, of an
output of an autocast region) behind that region, with autocast off. Gradients with respect to
float32 inputs and parameters are float32: their penalty is the same to the bit in autocast and
outside (measured on a CPU), so both are right. CPU autocast does not cast powers and sums up.

## Why is this bad
The penalty is computed of gradients that are multiplied by the scale: a squared norm is 65536
squared, 4.3e9 times too large, and swamps the loss. It also changes whenever the scale does, so
the weight of the penalty is never the one that was set.

The penalty is part of the forward pass. Autocast runs its powers and sums in float32; with
autocast off they run in the gradients' own 16 bits, where the square of 300 is inf, and that of
1e-4 is 0.

## Example
    grads = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    penalty = sum(g.pow(2).sum() for g in grads)
    scaler.scale(loss + penalty).backward()

## Use instead
    grads = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    inverse = 1.0 / scaler.get_scale()
    grads = [g * inverse for g in grads]
    with torch.autocast("cuda", dtype=torch.float16):
        penalty = sum(g.pow(2).sum() for g in grads)
    scaler.scale(loss + penalty).backward()

## Fix safety
No automatic fix: the gradients may be used in several places, and penalty weights have to be
tuned again.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import Grad, Op
from ampwise.lint.model.tensors import is_low, origins
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
            elif event.creates_graph and (op := _outside(trace, event)) is not None:
                yield Mistake(
                    op.node,
                    op.module,
                    "the gradient penalty is computed outside autocast, of 16-bit gradients of an "
                    "output that ran inside: squares and sums run in 16 bits, where 300 squared is "
                    "inf and small ones are 0; compute the penalty inside the same autocast, or of "
                    "gradient.float()",
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


PENALTY = ("square", "pow", "mul", "sum", "norm", "linalg.norm", "linalg.vector_norm")


def _outside(trace: Trace, grad: Grad) -> Op | None:
    """The first operation of a penalty that runs in 16 bits because autocast is off."""
    if not is_low(grad.result.dtype) or not _ran_in_autocast(grad.result):
        return None
    for op in trace.of(Op):
        if op.path in PENALTY and op.context.region is None and not op.context.no_grad:
            first = op.inputs[0] if op.inputs else None
            if isinstance(first, Tensor) and is_low(first.dtype) and _is_of(first, grad.result):
                return op
    return None


def _ran_in_autocast(tensor: Tensor) -> bool:
    """Whether what a tensor was computed of ran in a region that casts powers and sums up."""
    regions = [each.region for each in origins(tensor)]
    return any(each is not None and each.device != "cpu" for each in regions)


def _is_of(tensor: Tensor, gradient: Tensor) -> bool:
    """Whether it is a gradient, or one of several that one call gave."""
    return tensor.key == gradient.key or tensor.key.startswith(f"{gradient.key}[")
