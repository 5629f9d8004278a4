"""The forwards that run just now: a step is over before another on the same parameters begins."""

from __future__ import annotations

from threading import get_ident

from ampwise.errors import UsageError
from ampwise.step.members import Members

_Entry = tuple[int, Members]
"""A thread, and what a forward in it trains."""

_running: list[_Entry] = []


def enter(members: Members) -> _Entry:
    """A forward that trains these begins in this thread; what to `leave` it by."""
    entry = get_ident(), members
    _running.append(entry)
    return entry


def leave(entry: _Entry) -> None:
    """It is over."""
    _running.remove(entry)


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
