"""Which lines make the error of a step's gradients.

A shadow that rounds at some lines only, and decides by itself, shows the harm that these lines do.
Rounding errors are small and independent: what lines do alone adds up, as squares of norms, to what
they do together. So the lines are found by halves, and those that do little are never looked at one
by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

_LEAST = 0.1
"""Share of the error below which a line is not looked for."""
_MOST_RUNS, _MOST_S = 48, 60.0
"""Shadows that are run, and seconds after which none is begun: lines are left out then."""

_Line = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Carrier:
    """A line whose rounding makes a part of the error.

    Attributes
    ----------
    worst
        The operation on it, in forward where there is one, that is least exact by itself.
    share
        Of the square of the error's norm, what this line makes alone.
    """

    worst: OperationError
    share: float

    @property
    def place(self) -> Place:
        """Where that operation is."""
        return self.worst.place


def carriers(
    step: Replayable, stash: Stash, run: ShadowRun, names: Collection[str]
) -> list[Carrier]:
    """Lines that make a tenth or more of the error of some gradients, the largest share first.

    Parameters
    ----------
    run
        What the step gave, and what it should have given.
    names
        Whose gradients are looked at, each beside its own size.
    """
    lines: dict[_Line, OperationError] = {}
    for each in run.errors:
        if each.local_db < math.inf and each.place.file:
            at = each.place.file, each.place.line
            lines[at] = min(lines.get(at, each), each, key=_rank)
    whole = GradientErrors(run.replayed.gradients, run.gradients).relative(names) ** 2
    runs, began = count(), time.monotonic()

    def harm(some: Collection[_Line]) -> float:
        if next(runs) >= _MOST_RUNS or time.monotonic() - began > _MOST_S:
            return 0.0
        alone = shadow(
            step, stash, errors=False, decides=not run.decided,
            rounds=lambda place: (place.file, place.line) in some,
        )  # fmt: skip
        share = GradientErrors(alone.gradients, run.gradients).relative(names) ** 2 / whole
        return share if math.isfinite(share) else math.inf  # rounded there, it breaks

    def among(some: Sequence[_Line]) -> Iterator[tuple[_Line, float]]:
        share = harm(set(some))
        if share < _LEAST:
            return
        if len(some) == 1:
            yield some[0], share
        else:
            yield from among(some[: len(some) // 2])
            yield from among(some[len(some) // 2 :])

    if not lines or not 0 < whole < math.inf:
        return []
    found = [Carrier(lines[at], min(1.0, share)) for at, share in among(list(lines))]
    return sorted(found, key=lambda each: -each.share)


def _rank(error: OperationError) -> tuple[bool, float]:
    return error.place.phase != "forward", error.local_db
