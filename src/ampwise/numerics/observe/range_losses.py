"""What leaves the range of a format where it is rounded: what becomes inf, or 0, or subnormal.

That is told by the elements: a tensor of which most elements became 0 may have all of its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ampwise import formats
from ampwise.formats import dtype_name
from ampwise.places import Place

Part = Literal["overflow", "underflow"]
PARTS: tuple[Part, ...] = ("overflow", "underflow")

_MOST = 0.5
"""Share of the square of an error, from which on a part of it makes most of it."""


@dataclass(frozen=True, slots=True)
class RangeLoss:
    """Numbers that an operation turned into inf; or into 0, or subnormal ones with fewer digits.

    Of the call of it that lost most.

    Attributes
    ----------
    lost
        Which elements of its result are.
    elements, zeros
        How many; and how many of these are 0.
    most
        The largest magnitude that these should have.
    """

    part: Part
    name: str
    place: Place
    dtype: str
    lost: Tensor
    elements: int
    zeros: int
    most: float


class RangeLosses:
    """Keeps them, by operation and place."""

    def __init__(self) -> None:
        self._found: dict[tuple[Part, str, Place], RangeLoss] = {}

    @property
    def found(self) -> list[RangeLoss]:
        """All, in the order in which they were met."""
        return list(self._found.values())

    def note(self, name: str, place: Place, result: Tensor, wanted: Tensor) -> None:
        """An operation made a result of these numbers."""
        for part in PARTS:
            lost = is_of(part, result, wanted)
            sizes, before = wanted[lost].abs(), self._found.get((part, name, place))
            if sizes.numel() > (0 if before is None else before.elements):
                self._found[part, name, place] = RangeLoss(
                    part, name, place, dtype_name(result.dtype), lost, sizes.numel(),
                    int((lost & (result == 0)).sum()), float(sizes.max()),
                )  # fmt: skip


def is_of(part: Part, result: Tensor, wanted: Tensor) -> Tensor:
    """Which elements of a result became inf, or lost more than a normal number loses."""
    fmt, size = formats.lookup(result.dtype), wanted.abs()
    if part == "overflow":
        return result.isinf() & (size > fmt.max) & size.isfinite()
    error = (result.detach().double() - wanted).abs()
    return (size < fmt.min_normal) & (error > fmt.eps * size)


def most_of(
    error: float, losses: Iterable[RangeLoss], error_of: Callable[[Part], float]
) -> RangeLoss | None:
    """Which of some losses makes most of the error that rounding makes; None if none does.

    Parameters
    ----------
    error
        Square of that error.
    error_of
        The same, of what overflows or underflows alone.
    """
    found: list[tuple[float, RangeLoss]] = []
    losses = list(losses)
    for part in PARTS:
        lost = [each for each in losses if each.part == part]
        alone = error_of(part) if lost else 0.0
        if alone > 0 and alone >= _MOST * error:
            found.append((alone, max(lost, key=lambda each: each.elements)))
    return max(found, key=lambda each: each[0])[1] if found else None
