"""A value that was lost without a NaN: where, why, and what is to be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampwise.numerics.observe.roots import Root
from ampwise.numerics.result import CauseName, Extent, Passed
from ampwise.places import NOWHERE, Place


@dataclass(frozen=True, slots=True)
class Lost:
    """Where a value was lost, why, and what is to be said.

    Attributes
    ----------
    cause
        None where `root` is still to be explained, and of a note.
    severe
        Whether it is a fault; else a note.
    scale
        The loss scale that mends it.
    """

    cause: CauseName | None
    explanation: str
    place: Place
    op: str
    dtype: str
    severe: bool
    root: Root | None = None
    scale: float | None = None
    extent: Extent | None = None
    history: Sequence[Passed] = ()


def note(text: str) -> Lost:
    """Something to be said that is no fault."""
    return Lost(None, text[0].upper() + text[1:], NOWHERE, "", "", severe=False)
