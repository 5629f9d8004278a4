"""Which lines make the error of a step's gradients.

A shadow that rounds at some lines only, and decides by itself, shows the harm that these lines do.
Rounding errors are small and independent: what lines do alone adds up, as squares of norms, to what
they do together. So the lines are found by halves, and those that do little are never looked at one
by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.range_losses import Part, RangeLoss, most_of
from ampwise.numerics.observe.shadow import Rounds, ShadowRun, shadow
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

LEAST = 0.1
"""Share of the error below which a line is not looked for."""
_MOST = 0.5
"""The same, from which on a line makes most of it."""
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
    alone
        Whether no other operation on it rounds.
    """

    worst: OperationError
    share: float
    alone: bool

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
    lines: dict[_Line, list[OperationError]] = {}
    for each in run.errors:
        if each.local_db < math.inf and each.place.file:
            lines.setdefault(each.place.file_line, []).append(each)
    whole = _squared(run.replayed.gradients, run, names)
    runs, began = count(), time.monotonic()

    def harm(some: Collection[_Line]) -> float:
        if next(runs) >= _MOST_RUNS or time.monotonic() - began > _MOST_S:
            return 0.0
        share = _squared(_rounded_at(step, stash, run, some).gradients, run, names) / whole
        return share if math.isfinite(share) else math.inf  # rounded there, it breaks

    def among(some: Sequence[_Line]) -> Iterator[tuple[_Line, float]]:
        share = harm(set(some))
        if share < LEAST:
            return
        if len(some) == 1:
            yield some[0], share
        else:
            yield from among(some[: len(some) // 2])
            yield from among(some[len(some) // 2 :])

    if not lines or not 0 < whole < math.inf:
        return []
    found = [_carrier(lines[at], share) for at, share in among(list(lines))]
    return sorted(found, key=lambda each: -each.share)


def _carrier(operations: Sequence[OperationError], share: float) -> Carrier:
    forward = {each.name for each in operations if each.place.phase == "forward"}
    return Carrier(min(operations, key=_rank), min(1.0, share), alone=len(forward) < 2)


def harm_of(
    step: Replayable, stash: Stash, run: ShadowRun, places: Collection[Place], op: str = ""
) -> float:
    """How much of a step's error rounding in forward on some lines makes, as shares of squares.

    Of the error of its gradients, or of that of a loss, whichever is more.

    Parameters
    ----------
    op
        Of these lines, only operations of this name.
    """
    lines = {each.file_line for each in places}
    rounds = Rounds(
        lambda name, at: at.file_line in lines and at.phase == "forward" and op in ("", name)
    )
    alone = _rounded(step, stash, run, rounds)
    whole = _squared(run.replayed.gradients, run, run.gradients.keys())
    here = _error(alone, run)
    share = here / whole if 0 < whole < math.inf else math.inf if here else 0.0
    return max([share, *_of_losses(alone, run)])


def makes_loss(step: Replayable, stash: Stash, run: ShadowRun, place: Place) -> bool:
    """Whether rounding on one line makes most of the error of a loss."""
    alone = _rounded_at(step, stash, run, {place.file_line})
    return any(share >= _MOST for share in _of_losses(alone, run))


def out_of_range(step: Replayable, stash: Stash, run: ShadowRun, place: Place) -> RangeLoss | None:
    """What became inf, or 0, on a line, where that makes most of the line's error; None if not."""
    line = {place.file_line}
    whole = _rounded_at(step, stash, run, line)
    return most_of(
        _error(whole, run),
        (each for each in whole.range_losses if each.place.phase == "forward"),
        lambda part: _error(_rounded_at(step, stash, run, line, part), run),
    )


def _error(alone: ShadowRun, run: ShadowRun) -> float:
    """Square of the error of all gradients; inf where rounding makes NaN."""
    error = _squared(alone.gradients, run, run.gradients.keys())
    return error if math.isfinite(error) else math.inf


def _of_losses(alone: ShadowRun, run: ShadowRun) -> Iterator[float]:
    """Of the square of each loss's error, the share that a run makes of it."""
    for rounded, ideal, actual in zip(alone.losses, run.losses, run.replayed.losses, strict=True):
        whole = abs(float(actual) - float(ideal)) ** 2
        here = abs(float(rounded) - float(ideal)) ** 2
        yield here / whole if whole else (math.inf if here else 0.0)


def _rounded_at(
    step: Replayable, stash: Stash, run: ShadowRun, lines: Collection[_Line],
    part: Part | None = None,
) -> ShadowRun:  # fmt: skip
    """The same step, rounded on these lines only."""
    return _rounded(step, stash, run, Rounds.on(lines, part))


def _rounded(step: Replayable, stash: Stash, run: ShadowRun, rounds: Rounds) -> ShadowRun:
    return shadow(step, stash, errors=False, decides=not run.decided, rounds=rounds)


def _squared(gradients: Mapping[str, Tensor], run: ShadowRun, names: Collection[str]) -> float:
    """Square of the error of some gradients, beside their own size."""
    return GradientErrors(gradients, run.gradients).relative(names) ** 2


def _rank(error: OperationError) -> tuple[bool, float]:
    return error.place.phase != "forward", error.local_db
