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

import ast
from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import Accumulate, Event, Report
from ampwise.lint.model.nodes import Node
from ampwise.lint.model.queries import accumulates, step_loops, uses_amp
from ampwise.lint.model.roles import dotted
from ampwise.lint.model.values import Scaler, Tensor, Wrapper, key_of
from ampwise.lint.rule import Mistake, rule


@rule("AMP115", "scaled-loss-reported", "warning", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    loops = step_loops(code)
    for trace in code.traces:
        windows = _windows(trace)
        for event in trace.events:
            if any(id(each.node) in loops.nodes for each in event.context.loops):
                if isinstance(event, Report):
                    yield from _mistakes(event, event.tensor, windows)
                elif (
                    isinstance(event, Accumulate)
                    and isinstance(event.added, Tensor)
                    and not event.added.host  # a number is reported, too
                ):
                    yield from _mistakes(event, event.added, windows)


Windows = dict[str, set[int]]
"""What losses are divided by, and the loops that run over the micro-batches of one window only."""


def _windows(trace: Trace) -> Windows:
    found: Windows = {}
    for backward, step in accumulates(trace):
        if isinstance(backward.tensor, Tensor) and backward.tensor.divided:
            around = {id(each.node) for each in step.context.loops}
            inner = {id(each.node) for each in backward.context.loops} - around
            found.setdefault(key_of(backward.tensor.divisor), set()).update(inner)
    return found


def _mistakes(event: Report | Accumulate, tensor: Tensor, windows: Windows) -> Iterator[Mistake]:
    yield from _scaled(event, tensor)
    if _is_too_small(event, tensor, windows):
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


def _is_too_small(event: Report | Accumulate, tensor: Tensor, windows: Windows) -> bool:
    """Whether it was divided by the number of micro-batches, and nothing makes up for that."""
    if not tensor.divided or (isinstance(event, Report) and event.rescaled):
        return False
    inner = windows.get(key_of(tensor.divisor))
    return inner is not None and not _is_window_sum(event, inner)


def _is_window_sum(event: Report | Accumulate, inner: set[int]) -> bool:
    """Added up over the micro-batches of one window, which makes it their mean."""
    if isinstance(event, Report) and not event.into:
        return False
    loop = event.context.loops[-1].node
    return id(loop) in inner or _starts_anew(event, loop)


def _starts_anew(event: Report | Accumulate, loop: Node) -> bool:
    """Whether the sum is set to zero inside the loop that adds to it."""
    if not isinstance(event.node, ast.AugAssign):
        return False
    name = dotted(event.node.target)
    return any(
        isinstance(each, ast.Assign) and any(dotted(target) == name for target in each.targets)
        for each in ast.walk(loop)
    )
