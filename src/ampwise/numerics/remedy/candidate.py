"""A change that may mend a fault, as a replay can try it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ampwise.policy import Policy


@dataclass(frozen=True)
class Candidate:
    """A fix that can be tried, or (`tried` False) only be told.

    Attributes
    ----------
    what, how
        In a few words, and what to write.
    around, policy, scale, change
        What a replay is made with: a context, and as for `Replayable.replay`.
    otherwise
        Tried only where none before it held.
    effective
        Asked after it was tried: whether there was anything that it changes.
    """

    what: str
    how: str
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    policy: Policy | None = None
    scale: float | None = None
    change: Callable[[Any], Any] | None = None
    tried: bool = True
    otherwise: bool = False
    effective: Callable[[], bool] = lambda: True


AS_IT_IS = Candidate("", "")
"""No change."""
