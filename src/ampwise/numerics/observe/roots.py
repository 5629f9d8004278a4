"""Roots: operations that first turned clean values into inf or NaN; and what carried them on.

`BadValues` is the graph of a replay's bad values: from any of them it leads back to the roots that
they come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampwise.numerics.observe.bits import all_bits
from ampwise.numerics.observe.operations import tensors
from ampwise.places import Place

HISTORY = 6
"""Operations before a root that are told."""

_LONGEST = 200
"""Places of a path that are told."""


@dataclass(slots=True)
class Root:
    """An operation with clean inputs and a non-finite output.

    Attributes
    ----------
    index
        Its number among the operations of the replay.
    occurrence
        How many operations of the same name at the same place came before it.
    func, args, kwargs
        The call, with copies of its inputs; `func` is None for a tensor that was bad from the
        start.
    outputs
        Copies of its floating-point results.
    source
        What the bad tensor was, if it came from outside: ``batch[0]``, ``parameter w``, ...
    swallowed_by
        Name, place and occurrence of the operation that made finite values of it; None if none did.
    fed_by
        The tensor from outside whose infinities, taken for a mask, are among its inputs.
    before
        What made the largest of its inputs, with what came before that.
    scales
        Format of float8 of a larger tensor that it was multiplied into.
    """

    index: int
    name: str
    place: Place
    bits: int
    occurrence: int = 0
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    source: str = ""
    swallowed_by: tuple[str, Place, int] | None = None
    fed_by: Root | None = None
    before: Flow | None = None
    scales: str = ""

    @property
    def history(self) -> list[Flow]:
        """The last operations before it, the latest last."""
        found: list[Flow] = []
        flow = self.before
        while flow is not None and len(found) < HISTORY:
            found.append(flow)
            flow = flow.before
        return found[::-1]

    @property
    def has_finite_inputs(self) -> bool:
        """Whether what it was given, as far as that was kept, is finite."""
        return not all_bits(tensors((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True)
class Flow:
    """An operation that a value came through.

    Attributes
    ----------
    extreme
        The finite value of the largest magnitude, with its sign.
    before
        The one that made the largest of what it was given.
    """

    name: str
    place: Place
    dtype: str
    extreme: float
    before: Flow | None


@dataclass(frozen=True, slots=True)
class _Carrier:
    """An operation that passed bad values on."""

    name: str
    place: Place
    parents: tuple[int, ...]


class BadValues:
    """Roots and carriers by their index, each linked to what made its bad inputs.

    Attributes
    ----------
    roots
        By index, in order; of tensors from outside it is negative.
    """

    def __init__(self) -> None:
        self.roots: dict[int, Root] = {}
        self._carriers: dict[int, _Carrier] = {}

    def carried(self, index: int, name: str, place: Place, parents: Iterable[int]) -> None:
        """An operation passed on what these made."""
        self._carriers[index] = _Carrier(name, place, tuple(dict.fromkeys(parents)))

    def behind(self, maker: int) -> list[Root]:
        """Roots that a bad value comes from."""
        links = self._followed([maker])
        return [self.roots[index] for index in (maker, *links) if index in self.roots]

    def earliest(self, makers: Iterable[int]) -> tuple[Root | None, list[str]]:
        """The first root that some bad values come from; and by which modules, or lines."""
        makers = list(makers)
        links = self._followed(makers)
        known = [index for index in (*makers, *links) if index in self.roots]
        if not known:
            return None, []
        first = min(known)  # what was bad from the start comes before every operation
        return self.roots[first], self._path(first, links)

    def _followed(self, makers: Iterable[int]) -> dict[int, int]:
        """What some makers were fed by, directly or not, and whom each of these fed."""
        links: dict[int, int] = {}
        queue = list(makers)
        while queue:
            maker = queue.pop()
            for parent in self._carriers[maker].parents if maker in self._carriers else ():
                if parent not in links and parent != maker:
                    links[parent] = maker
                    queue.append(parent)
        return links

    def _path(self, root: int, links: dict[int, int]) -> list[str]:
        path: list[str] = []
        index: int | None = root
        origin = self.roots[root].place
        while index is not None and len(path) < _LONGEST:
            step = self.roots.get(index) or self._carriers[index]
            place = step.place
            word = place.module or (place.line_from(origin) if place.line else step.name)
            word = f"{word} (backward)" if place.phase == "backward" else word
            if not path or path[-1] != word:
                path.append(word)
            index = links.get(index)
        return path
