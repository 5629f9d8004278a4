"""Which way a path goes where the source does not say, and all the ways worth going.

A path is an assignment of truth values to conditions. The interpreter asks its `Oracle`; what it
asked for the first time can go the other way on another path. Conditions are told apart by their
key (`values.key_of`), so ``if use_amp:`` goes the same way each time on one path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
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


FOREIGN = 3.0
"""What a change in another file costs, where one in the file that is judged costs 1."""
PRECISION = re.compile(r"precision|dtype|(?<![a-z])amp(?![a-z])|fp16|bf16|float16|scaler|autocast")
PARALLEL = re.compile(r"(?<![a-z])(fsdp|ddp|deepspeed)(?![a-z])")
CHOICE = 0.5
"""What a change costs that chooses the precision or the wrapper: each is worth a path."""


def _cost(oracle: Oracle, key: str) -> float:
    if PRECISION.search(key) or PARALLEL.search(key):
        return CHOICE
    return FOREIGN if key in oracle.foreign else 1.0


def explore(walk: Callable[[Oracle], T], most: int) -> Iterator[T]:
    """Walk paths, the default one first, then those that differ from it least.

    Conditions of other files, of which networks have many, cost `FOREIGN` each: options of the file
    that is judged, and what chooses the precision, are tried together before those. At most `most`;
    contradictory ones are left out.
    """
    order = count()
    waiting: list[tuple[float, int, dict[str, bool]]] = [(0, next(order), {})]
    seen: set[frozenset[tuple[str, bool]]] = set()
    while waiting and most > 0:
        cost, _, told = heappop(waiting)
        oracle = Oracle(told)
        most -= 1
        result = walk(oracle)
        if not oracle.contradicted:
            yield result
        for key in oracle.asked:
            other = {**told, key: not oracle.decided[key]}
            mark = frozenset(other.items())
            if mark not in seen:
                seen.add(mark)
                heappush(waiting, (cost + _cost(oracle, key), next(order), other))
