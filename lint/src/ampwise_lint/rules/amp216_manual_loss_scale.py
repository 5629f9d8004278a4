"""# manual-loss-scale

## What it does
Reports backward of a loss that was multiplied by a constant, when gradients are divided by that
constant by hand before the step. A weight that nothing undoes is not reported.

## Why is this bad
Nothing looks for inf and NaN: the first overflow reaches the parameters. And one constant does
not fit a whole training: gradients shrink as the loss does, where GradScaler doubles its scale
after 2000 good steps and halves it at an overflow.

## Example
    (loss * 1024).backward()
    for p in model.parameters():
        p.grad.div_(1024)
    optimizer.step()

## Use instead
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: scaler, update and checkpoint have to be added in several places.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import HALF, SCALER
from ampwise_lint.values.abstract import Const, Tensor, Value, key_of
from ampwise_lint.values.events import Backward, GradientRead


@rule("AMP216", "manual-loss-scale", "warning", triggers=(SCALER, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        factor: Value | None = None
        backward: Backward | None = None
        for event in trace.events:
            match event:
                case Backward(tensor=Tensor() as tensor):
                    factor = tensor.factor if tensor.factor is not None else tensor.divisor
                    backward = event if factor is not None else None
                case GradientRead(is_edit=True) if backward is not None and _undoes(event, factor):
                    yield Mistake(
                        backward.node,
                        backward.module,
                        "the loss is multiplied by a constant and gradients are divided by it by "
                        "hand: nothing checks for inf and NaN, and no constant fits a whole "
                        "training; use torch.amp.GradScaler",
                    )
                    backward = None
                case _:
                    pass


def _undoes(event: GradientRead, factor: Value | None) -> bool:
    divisor = event.divisor
    if divisor is None or factor is None:
        return False
    if isinstance(divisor, Const) and isinstance(factor, Const):
        try:
            return divisor.value == factor.value or abs(divisor.value * factor.value - 1) < 1e-9
        except TypeError:
            return False
    return key_of(factor) in (key_of(divisor), f"1 / {key_of(divisor)}")
