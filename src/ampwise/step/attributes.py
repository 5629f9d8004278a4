"""What modules keep in plain Python: counters, lists, tensors that forward assigns anew.

A replay runs forward once more, and must leave all of it as it was; an update that is made again,
its optimizer. Attributes are put back by
reference, and containers among them (nested ones, too) with what they held; an object of a class of
one's own that changes inside is beyond that.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """Attributes of some modules (not of those inside) or other objects, as they are now.

    Parameters
    ----------
    internals
        Whether what every module has is looked into, too: parameters, hooks, ...
    """

    def __init__(self, owners: Iterable[object], *, internals: bool = True) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # containers, with copies
        self._left = frozenset[str]() if internals else _internals()
        for each in owners:
            self._keep(vars(each))

    @property
    def changed(self) -> bool:
        """Whether anything has changed since."""
        return any(not _same(container, held) for container, held in self._kept.values())

    def restore(self) -> None:
        """Put back what has changed since."""
        for container, held in self._kept.values():
            if not _same(container, held):
                _refill(container, held)

    def _keep(self, value: Any) -> None:
        if not isinstance(value, _CONTAINERS) or id(value) in self._kept:
            return
        self._kept[id(value)] = (value, copy.copy(value))
        for name, each in _named_items(value):
            if name not in self._left:
                self._keep(each)


@cache
def _internals() -> frozenset[str]:
    """Attributes that every module has."""
    return frozenset(vars(nn.Module()))


def _named_items(container: Any) -> Iterable[tuple[Any, Any]]:
    """What a dict holds with its keys; of other containers without."""
    return container.items() if isinstance(container, dict) else ((None, e) for e in container)


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _same(container: Any, held: Any) -> bool:
    """Whether the very same objects are in both."""
    if isinstance(container, dict) and list(container) != list(held):
        return False
    now, before = _items(container), _items(held)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _refill(container: Any, held: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, list | deque) else container.update
    add(held)
