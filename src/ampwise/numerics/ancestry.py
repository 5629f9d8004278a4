"""What a value was made of: operations, followed back from an argument that went wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampwise.numerics.places import Place

DIFFERENCES = frozenset(["sub", "sub_", "rsub", "add", "add_", "sum", "mean"])
"""Operations whose result may be small beside what they add and subtract."""

_CANCELLED_DB = 10.0
"""Loss of SQNR from the inputs to a difference above which its digits cancelled."""

_SUMS, _BOUNDS = ("add", "add_"), ("clamp", "clamp_", "clamp_min", "clamp_min_")


@dataclass(frozen=True, slots=True, eq=False)
class Ancestor:
    """An operation that took part in making a value.

    Attributes
    ----------
    dtype
        Format of its result.
    inputs_db, propagated_db
        SQNR of its worst input, and of its result, against the float64 shadow.
    lost
        Its constants that had no effect: too small beside the other term, or for the format.
    """

    name: str
    place: Place
    dtype: str
    inputs_db: float
    propagated_db: float
    lost: tuple[float, ...]
    parents: tuple[Ancestor, ...]

    @property
    def cancels(self) -> bool:
        """Whether it is a difference that lost its digits."""
        return self.name in DIFFERENCES and self.inputs_db - self.propagated_db > _CANCELLED_DB


def back_from(start: Ancestor | None) -> Iterator[Ancestor]:
    """An operation and those it was made from, the nearest first."""
    queue = deque([] if start is None else [start])
    met = set(queue)
    while queue:
        yield (each := queue.popleft())
        queue += [parent for parent in each.parents if parent not in met]
        met.update(each.parents)


def lost_constants(name: str, args: Any, kwargs: Any, result: Tensor) -> tuple[float, ...]:
    """The constant that a sum or a lower bound was called with, where it changed nothing."""
    constant = args[1] if len(args) > 1 else kwargs.get("min")
    if name not in (*_SUMS, *_BOUNDS) or not isinstance(constant, float) or not constant > 0:
        return ()
    wide = result.double()
    lost = wide == args[0].double() if name in _SUMS else wide < constant
    return (constant,) if bool(lost.any()) else ()
