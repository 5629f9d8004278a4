"""Steps that a wrapper runs: what of them is in sight."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Trace
from ampwise_lint.values.abstract import Tensor
from ampwise_lint.values.events import Event, Managed


def is_managed(trace: Trace) -> bool:
    """Whether a wrapper runs the step on this path: what it does is not in sight."""
    return any(isinstance(each, Managed) for each in trace.events)


def is_led(trace: Trace) -> bool:
    """Whether a wrapper does more in the step on this path than scale losses and clip."""
    return any(not each.plain for each in trace.of(Managed))


def is_given(event: Event) -> bool:
    """Whether a wrapper runs backward of a loss there."""
    return isinstance(event, Managed) and event.loss is not None


def given_in_parts(trace: Trace) -> Iterator[tuple[Managed, Tensor]]:
    """Each backward of part of a window that a wrapper runs: of a loss that was divided."""
    for event in trace.of(Managed):
        if event.loss is not None and event.loss.divided:
            yield event, event.loss
