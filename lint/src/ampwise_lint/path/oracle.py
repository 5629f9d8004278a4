"""Which way a path goes where the source does not say, and all the ways worth going.

A path is an assignment of truth values to conditions. The interpreter asks its `Oracle`; what it
asked for the first time can go the other way on another path. Conditions are told apart by their
key (`values.key_of`), so ``if use_amp:`` goes the same way each time on one path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Oracle:
    """Answers conditions: as told, else by default, and notes what it was asked."""

    def __init__(self, told: dict[str, bool]) -> None:
        self.decided = dict(told)
        self.asked: list[str] = []
        self.foreign: set[str] = set()
        """Of these, what was asked in another file."""
        self.contradicted = False
        self.equal: dict[str, str] = {}
        """What things were found equal to."""
        self.among: dict[str, frozenset[str]] = {}
        """What things were found to be one of."""

    def ask(self, key: str, default: bool, *, own: bool = True) -> bool:
        """Whether a condition holds on this path; `own`: it stands in the file that is judged."""
        if key not in self.decided:
            self.decided[key] = default
            self.asked.append(key)
            if not own:
                self.foreign.add(key)
        return self.decided[key]

    def assume(self, key: str) -> None:
        """Something happened that is possible only where a condition holds."""
        if not self.decided.setdefault(key, True):
            self.contradicted = True


def explore(walk: Callable[[Oracle], T], most: int) -> Iterator[T]:
    """Walk paths, the default one first, then those that differ in one condition, in two, ...

    Of these, those first that differ in the file that is judged. At most `most`; contradictory ones
    are left out.
    """
    waiting: deque[dict[str, bool]] = deque([{}])
    seen: set[frozenset[tuple[str, bool]]] = set()
    while waiting and most > 0:
        oracle = Oracle(waiting.popleft())
        told = dict(oracle.decided)
        most -= 1
        result = walk(oracle)
        if not oracle.contradicted:
            yield result
        for key in sorted(oracle.asked, key=oracle.foreign.__contains__):
            other = {**told, key: not oracle.decided[key]}
            mark = frozenset(other.items())
            if mark not in seen:
                seen.add(mark)
                waiting.append(other)
