"""The forwards that run just now: a step is over before another on the same parameters begins."""

from __future__ import annotations

from threading import get_ident

from ampwise.errors import UsageError
from ampwise.step.members import Members

_running: list[tuple[int, Members]] = []
"""What the forwards train, by the thread they run in."""


def enter(members: Members) -> None:
    """A forward that trains these begins in this thread."""
    _running.append((get_ident(), members))


def leave(members: Members) -> None:
    """It is over."""
    _running.remove((get_ident(), members))


def refuse(what: str, members: Members) -> None:
    """Refuse a step inside a forward that trains the same parameters.

    Raises
    ------
    UsageError
        When this thread is in one.
    """
    for thread, other in _running:
        mine = other is members or other.shares_with(members)
        if mine and thread == get_ident():
            whose = "the same step" if other is members else "another step on the same model"
            raise UsageError(
                f"{what} inside a forward of {whose}: a step is over before the next begins; "
                "call it after that"
            )
