"""# gradient-penalty-on-scaled-grads

## What it does
Reports `torch.autograd.grad` of a scaled loss or output whose result is used without dividing
it by the scale. Silent for gradients of outputs that were not scaled, and where the scale does
not matter: their sign, a ratio of two of them, `p.grad = ...` before the scaler's step. Also
reports a penalty that is computed of 16-bit gradients (`create_graph=True`, with respect to a
16-bit activation, of an output of an autocast region) behind that region, with autocast off.
Gradients with respect to float32 inputs and parameters are float32: their penalty is the same to
the bit in autocast and outside (measured on a CPU), so both are right. CPU autocast does not cast
powers and sums up.

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
from dataclasses import dataclass

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Const, Tensor, Unknown, Value, is_low
from ampwise_lint.values.contents import flatten, origins
from ampwise_lint.values.events import Grad, GradientRead, Op, ScalerStep, Unscale

FREE = {"sign", "sgn", "sign_", "normalize", "argmax", "argmin", "argsort", "isfinite", "isnan"}
"""Operations whose result is the same for any scale."""
SAME = {
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "expand", "to",
    "expand_as", "view_as", "index", "neg", "abs", "sum", "mean", "norm", "linalg.norm", "max",
    "min", "amax", "amin", "linalg.vector_norm", "cat", "stack", "chunk", "split",
}  # fmt: skip
"""Operations whose result grows as their input does."""
POWER = {"square": 2.0, "square_": 2.0, "sqrt": 0.5, "sqrt_": 0.5, "rsqrt": -0.5}
TINY = 1e-2
"""What is added to a norm to divide by it."""


@rule("AMP116", "gradient-penalty-on-scaled-grads", "error", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        used = _used(trace)
        for event in trace.of(Grad):
            if _root(event.result) in used and not any(
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
            given = op.inputs if op.path == "mul" else op.inputs[:1]  # of itself: a square
            if given and all(_is_half_of(each, grad.result) for each in given):
                return op
    return None


def _ran_in_autocast(tensor: Tensor) -> bool:
    """Whether what a tensor was computed of ran in a region that casts powers and sums up."""
    regions = [each.region for each in origins(tensor)]
    return any(each is not None and each.device != "cpu" for each in regions)


def _is_half_of(value: Value, gradient: Tensor) -> bool:
    """Whether it is a gradient of 16 bits, or one of several that one call gave."""
    if not isinstance(value, Tensor) or not is_low(value.dtype):
        return False
    return value.key == gradient.key or value.key.startswith(f"{gradient.key}[")


@dataclass(slots=True)
class _Grown:
    """What was computed of scaled gradients."""

    power: float | None
    """Of the scale that it is multiplied by; None where the scale changes more than its size."""
    of: set[str]
    """The gradients."""
    is_used: bool = False
    """Something was computed of it."""


def _used(trace: Trace) -> set[str]:
    """Scaled gradients of which something is left, at the end of a path, that has the scale in it.

    By dimensional analysis: a gradient has the scale to the power of 1, its square of 2, the
    ratio of two of 0.
    """
    known: dict[str, _Grown] = {}
    steps = any(isinstance(each, ScalerStep | Unscale) for each in trace.events)
    for event in trace.events:
        if isinstance(event, Grad) and event.result.grad_scaled:
            root = _root(event.result)
            known[root] = _Grown(1.0, {root})
        elif isinstance(event, Op):
            _note(known, event)
        elif isinstance(event, GradientRead) and steps and isinstance(event.given, Tensor):
            given = known.get(_root(event.given))
            if given is not None and given.power == 1.0:
                given.is_used = True  # the step divides it
    left = [each.of for each in known.values() if not each.is_used and each.power != 0.0]
    return set[str]().union(*left)


def _note(known: dict[str, _Grown], op: Op) -> None:
    """Follow the scale through an operation."""
    inputs = flatten(op.inputs)
    grown = [known.get(_root(each)) if isinstance(each, Tensor) else None for each in inputs]
    sources = [each for each in grown if each is not None]
    if not sources or not isinstance(op.result, Tensor):
        return
    for each in sources:
        each.is_used = True
    power = _power(op.path, inputs, [0.0 if each is None else each.power for each in grown])
    known[_root(op.result)] = _Grown(power, set[str]().union(*(each.of for each in sources)))


def _power(path: str, inputs: list[Value], powers: list[float | None]) -> float | None:
    """The power of the scale in what an operation makes of inputs that have it in these powers."""
    first, *others = powers
    if path in FREE or not any(each != 0.0 for each in powers):
        return 0.0
    if first is None or None in others:
        return None
    second = others[0] if others and others[0] is not None else 0.0
    exponent = inputs[1].value if len(inputs) > 1 and isinstance(inputs[1], Const) else None
    if path in ("mul", "div"):
        return first + second if path == "mul" else first - second
    if path == "pow" and isinstance(exponent, int | float):
        return first * exponent
    if path in POWER:
        return first * POWER[path]
    small = all(isinstance(each, Const) and _is_tiny(each.value) for each in inputs[1:])
    if path in ("add", "clamp", "clamp_min") and small:
        return first
    same = path in SAME or path in ("add", "sub")
    tensors = [p for p, each in zip(powers, inputs, strict=True) if isinstance(each, Tensor)]
    alone = path in SAME or len(tensors) == len(inputs)
    return first if same and alone and len(set(tensors)) == 1 else None


def _is_tiny(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= TINY


def _root(tensor: Tensor) -> str:
    """The key of what a tensor is a part of."""
    return tensor.key.partition("[")[0]
