"""# clip-beyond-unscaled

## What it does
Reports clipping of the gradients of several optimizers when only one of these was unscaled.

## Why is this bad
The norm is that of all gradients together, and those that are still scaled are up to 65536 times
too large: they alone decide it. All are shrunk by that factor, so the network that was unscaled
hardly moves, and the other one is clipped to 1/65536 of the limit.

## Example
    scaler.unscale_(opt_a)
    torch.nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)
    scaler.step(opt_a)
    scaler.step(opt_b)

## Use instead
    scaler.unscale_(opt_a)
    scaler.unscale_(opt_b)
    torch.nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)
    scaler.step(opt_a)
    scaler.step(opt_b)

## Fix safety
No automatic fix: each network may be meant to be clipped by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import first_argument, site_in
from ampwise_lint.queries.owners import owners
from ampwise_lint.queries.precision import is_real
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Value
from ampwise_lint.values.events import Backward, Clip, ScalerStep, Unscale


@rule("AMP119", "clip-beyond-unscaled", "error", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for index, event in enumerate(trace.events):
            if isinstance(event, Clip) and (step := _forgotten(trace, index, event)) is not None:
                name = first_argument(step.node) or "the other optimizer"
                site = site_in(event, step.module)
                yield Mistake(
                    site.node,
                    site.module,
                    f"gradients of {name} are clipped together with others while they alone are "
                    "still multiplied by the loss scale: they decide the norm, and all shrink; "
                    f"call unscale_({name}) as well before clipping",
                )


def _forgotten(trace: Trace, index: int, clip: Clip) -> ScalerStep | None:
    """A later step of an optimizer that is clipped with one that was unscaled, and was not."""
    unscaled = _unscaled(trace, index)
    steps = _next_steps(trace, index)
    covered = [each for each in steps if _covers(clip.params, each.optimizer)]
    if not covered or id(covered[0].optimizer) not in unscaled:
        return None  # nothing was unscaled: AMP101
    return next((each for each in covered if id(each.optimizer) not in unscaled), None)


def _unscaled(trace: Trace, index: int) -> set[int]:
    """Optimizers unscaled since the last scaled backward, by ``id``."""
    found: set[int] = set()
    for event in reversed(trace.events[:index]):
        if isinstance(event, Unscale):
            found.add(id(event.optimizer))
        elif isinstance(event, Backward):
            return found if is_real(event.scaled) else set()
        elif isinstance(event, ScalerStep):
            return set()
    return set()


def _next_steps(trace: Trace, index: int) -> list[ScalerStep]:
    steps: list[ScalerStep] = []
    for event in trace.events[index:]:
        if isinstance(event, ScalerStep):
            steps.append(event)
        elif isinstance(event, Backward | Unscale) and not steps:
            return []  # others may still be unscaled, or are for another backward
        elif isinstance(event, Backward):
            break
    return steps


def _covers(params: Value | None, optimizer: Value | None) -> bool:
    """Whether all that an optimizer steps is among the parameters that are clipped."""
    clipped, stepped = owners(params), owners(optimizer)
    return bool(stepped) and all(
        any(each == whole or each.startswith(f"{whole}.") for whole in clipped) for each in stepped
    )
