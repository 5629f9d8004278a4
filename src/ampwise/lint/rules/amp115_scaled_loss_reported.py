"""# scaled-loss-reported

## What it does
Reports a loss that is printed, logged or summed after it was multiplied by the loss scale, or
after it was divided by the accumulation window. Silent for a sum over one window, and where it
is multiplied back.

## Why is this bad
The figure is 65536 times too large and halves or doubles with the scale, or it is too small by
the number of micro-batches. Runs cannot be compared, and early stopping or best-checkpoint
logic acts on it.

## Example
    loss = criterion(model(x), y) / accumulate
    scaler.scale(loss).backward()
    running += loss.detach()

## Use instead
    loss = criterion(model(x), y)
    scaler.scale(loss / accumulate).backward()
    running += loss.detach()

## Fix safety
No automatic fix: the figure in logs and thresholds changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Accumulate, Event, Report
from ampwise.lint.model.queries import accumulates, step_loops, uses_amp
from ampwise.lint.model.values import Scaler, Tensor, Wrapper, key_of
from ampwise.lint.rule import Mistake, rule


@rule("AMP115", "scaled-loss-reported", "warning", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    loops = step_loops(code)
    for trace in code.traces:
        windows = {
            key_of(backward.tensor.divisor)
            for backward, _ in accumulates(trace)
            if isinstance(backward.tensor, Tensor) and backward.tensor.divided
        }
        for event in trace.events:
            if any(id(each.node) in loops.nodes for each in event.context.loops):
                if isinstance(event, Report):
                    yield from _mistakes(event, event.tensor, windows)
                elif isinstance(event, Accumulate) and isinstance(event.added, Tensor):
                    yield from _mistakes(event, event.added, windows)


def _mistakes(event: Report | Accumulate, tensor: Tensor, windows: set[str]) -> Iterator[Mistake]:
    yield from _scaled(event, tensor)
    if tensor.divided and not _is_rescaled(event) and key_of(tensor.divisor) in windows:
        if not _is_window_sum(event):
            yield Mistake(
                event.node,
                event.module,
                "the loss is reported after it was divided for accumulation: the figure is too "
                "small by the number of micro-batches; report it before dividing, or multiply back",
            )


def _scaled(event: Event, tensor: Tensor) -> Iterator[Mistake]:
    if isinstance(tensor.scaled, Scaler | Wrapper):
        yield Mistake(
            event.node,
            event.module,
            "the loss is reported after it was multiplied by the loss scale: the figure is up to "
            "65,536 times too large and jumps with the scale; report it before scaling",
        )


def _is_rescaled(event: Report | Accumulate) -> bool:
    return isinstance(event, Report) and event.rescaled


def _is_window_sum(event: Report | Accumulate) -> bool:
    """Added up over the micro-batches of one window, which makes it their mean."""
    loops = event.context.loops
    adds = isinstance(event, Accumulate) or bool(event.into)
    return adds and len(loops) > 1 and not loops[-1].over_data
