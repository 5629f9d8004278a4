"""What a value was made of: operations, followed back from an argument that went wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampwise.numerics.observe.bits import extreme_of
from ampwise.places import Place

DIFFERENCES = frozenset(["sub", "sub_", "rsub", "add", "add_", "sum", "mean"])
"""Operations whose result may be small beside what they add and subtract."""

CANCELLED_DB = 10.0
"""Loss of SQNR from the inputs to a difference above which its digits cancelled."""

LOGARITHMS = frozenset(["log", "log_", "log2", "log10"])
"""Operations that are a difference to 1 where their argument is close to it."""
_ELEMENTWISE = frozenset(["sub", "sub_", "rsub", "add", "add_"]) | LOGARITHMS
_SUMS = frozenset(["add", "add_"])
_BOUNDS = frozenset(["clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"])
_MOST = 0.5
"""Share of the zeros of a result that come from an argument, from which on they began there."""
_RIGHT, _WRONG = 0.1, 0.3
"""Relative errors up to which an element is right, and from which on it is lost."""


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
    parents
        What its arguments were made by.
    cancelled
        Elements of its result whose digits cancelled: wrong, though the terms are right.
    rounded_to
        The constant that it was taken from, or added to, and that those terms had rounded to.
    flushed
        Elements of its result that are 0 and too small for the format.
    flushed_share
        Which part of all its elements they are.
    extreme
        The value of the largest magnitude in its result, with its sign.
    error, own, brought
        Norm of its result's error; of what it rounds away by itself; and of what each of `parents`
        brings. Known where it was asked for (`shares`).
    index
        Its number in the order of execution.
    overflowed
        The largest, by magnitude, of what is inf in its result, and a number in float64; 0 if none.
    of_one_sign
        Whether it is a sum, or a mean, of numbers that are all positive, or all negative.
    """

    name: str
    place: Place
    dtype: str
    inputs_db: float
    propagated_db: float
    lost: tuple[float, ...]
    parents: tuple[Ancestor, ...]
    cancelled: int = 0
    rounded_to: float | None = None
    flushed: int = 0
    flushed_share: float = 0.0
    extreme: float = 0.0
    error: float = 0.0
    own: float = 0.0
    brought: tuple[float, ...] = ()
    index: int = 0
    of_one_sign: bool = False
    overflowed: float = 0.0

    def where(self, origin: Place) -> str:
        """Name and line, for a sentence; of backward, that it is the derivative of the line.

        Parameters
        ----------
        origin
            Of the fault that the sentence is about: of its file the lines are meant.
        """
        named = f"{self.name} on {self.place.line_from(origin)}"
        return f"{named}, in its backward," if self.place.phase == "backward" else named

    @property
    def cancels(self) -> bool:
        """Whether it is a difference that lost its digits, as a whole or in some elements."""
        if self.name in LOGARITHMS:
            return self.cancelled > 0
        if self.name not in DIFFERENCES or self.of_one_sign:
            return False
        return self.cancelled > 0 or self.inputs_db - self.propagated_db > CANCELLED_DB


def back_from(start: Ancestor | None) -> Iterator[Ancestor]:
    """An operation and those it was made from, the nearest first."""
    queue = deque([] if start is None else [start])
    met = set(queue)
    while queue:
        yield (each := queue.popleft())
        queue += [parent for parent in each.parents if parent not in met]
        met.update(each.parents)


def flushed_first(start: Ancestor | None) -> Ancestor | None:
    """Where values began to fall below the format's smallest; None where `start` flushed none.

    A zero that is carried on is too small for the format in what is made of it, too. A few that an
    argument had before do not make the many that an operation gives.
    """
    found = start if start is not None and start.flushed else None
    while found is not None:
        before = next((each for each in found.parents if _made_most(each, found)), None)
        if before is None:
            return found
        found = before
    return None


def _made_most(before: Ancestor, found: Ancestor) -> bool:
    """Whether zeros of an argument make most of those of a result.

    By their number, as of what is added up or chosen from, or by their part, as of what is spread.
    """
    as_many = before.flushed >= _MOST * found.flushed
    return before.flushed > 0 and (as_many or before.flushed_share >= _MOST * found.flushed_share)


def largest_before(start: Ancestor, most: int) -> list[Ancestor]:
    """An operation and the last ones before it that made the largest of what they had, in order."""
    found: list[Ancestor] = [start]
    while found[-1].parents and len(found) < most:
        found.append(max(found[-1].parents, key=lambda each: abs(each.extreme)))
    return found[::-1]


def lost_constants(name: str, args: Any, ideal: Any, result: Tensor) -> tuple[float, ...]:
    """The constants that a sum or a bound was called with, where they changed nothing.

    Parameters
    ----------
    args, ideal
        Arguments by position, as they are and without rounding: a small tensor of no dimensions
        may be 0 already.
    """
    wide = result.double()
    if name in _SUMS and len(ideal) > 1 and isinstance(args[0], Tensor):
        constant = number_of(ideal[1])
        kept = constant is not None and constant > 0 and bool((wide == args[0].double()).any())
        return (constant,) if kept and constant is not None else ()
    if name not in _BOUNDS:
        return ()
    least = None if "max" in name else number_of(ideal[1]) if len(ideal) > 1 else None
    at = 1 if "max" in name else 2
    most = number_of(ideal[at]) if len(ideal) > at else None
    found: list[float] = []
    if least is not None and bool((wide < least).any()):
        found.append(least)
    if most is not None and bool((wide > most).any()):
        found.append(most)
    return tuple(found)


def number_of(value: Any) -> float | None:
    """A Python float, or a tensor of no dimensions, as a number; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if not value.dim() and value.is_floating_point() else None
    return value if isinstance(value, float) else None


def cancelled(
    name: str, args: Any, ideal: Any, result: Tensor, wanted: Tensor
) -> tuple[int, float | None]:
    """Elements of a difference that are lost though its terms are right, and what they rounded to.

    A logarithm is the difference of its argument to 1.

    Parameters
    ----------
    args, ideal
        Arguments by position, as they are and without rounding.
    """
    if name not in _ELEMENTWISE or result.shape != wanted.shape:
        return 0, None
    actual = result.detach().double()
    lost = ((actual - wanted).abs() > _WRONG * wanted.abs()) & ~actual.isinf()
    if not bool(lost.any()):
        return 0, None
    pairs = [(a.detach().double(), b) for a, b in zip(args[:2], ideal[:2], strict=True)
             if isinstance(a, Tensor) and a.is_floating_point()]  # fmt: skip
    for given, ideally in pairs:
        lost = lost & ((given - ideally).abs() <= _RIGHT * ideally.abs())
    count = int(lost.sum())
    constants = (abs(float(each)) for each in args[:2] if isinstance(each, int | float))
    constant = 1.0 if name in LOGARITHMS else next(constants, None)
    if not count or constant is None or len(pairs) != 1:
        return count, None
    terms = pairs[0][0].expand(lost.shape)[lost].abs()
    return count, constant if bool((terms == constant).any()) else None


def is_of_one_sign(name: str, ideal: Any) -> bool:
    """Whether an operation adds up numbers of one sign only, of which none can cancel another."""
    if name not in ("sum", "mean") or not isinstance(ideal[0], Tensor):
        return False
    return bool((ideal[0] >= 0).all()) or bool((ideal[0] <= 0).all())


def overflowed(result: Tensor, wanted: Tensor) -> float:
    """The largest of what is inf in a result, and should be a number; 0 if nothing is."""
    if result.shape != wanted.shape:
        return 0.0
    return extreme_of([wanted[result.isinf() & wanted.isfinite()]])


def flushed(result: Tensor, wanted: Tensor, least: float) -> int:
    """Elements that are 0 and should be numbers too small for the format.

    Parameters
    ----------
    least
        Its smallest number.
    """
    if result.shape != wanted.shape:
        return 0
    size = wanted.abs()
    return int(((result == 0) & (size > 0) & (size <= least)).sum())
