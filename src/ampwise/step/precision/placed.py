"""Modules whose ``forward`` is another one while a step's forward or backward runs.

It is put on the module itself, so it holds where the module is called without its hooks, the
compiler sees plain code, and names, parameters and hooks are the module's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ampwise.step.precision.base import Part

Forward = Callable[..., Any]

_PLACED = ("forward", "__deepcopy__")
"""What is put on a module."""


class Placed(Part):
    """Runs modules otherwise.

    Parameters
    ----------
    find
        Gives the modules as they are now.
    """

    def __init__(self, find: Callable[[], Sequence[nn.Module]]) -> None:
        self._find = find
        # Kept, so that a compiler that has seen a forward once knows it again.
        self._made: dict[nn.Module, tuple[Forward, Forward]] = {}
        self._placed: list[tuple[nn.Module, dict[str, Any]]] = []

    def instead(self, module: Any, forward: Forward) -> Forward:
        """What a module runs in place of its own forward."""
        raise NotImplementedError

    def enter(self) -> None:
        """Put the forwards in place."""
        for module in self._find():
            own = {name: vars(module)[name] for name in _PLACED if name in vars(module)}
            self._placed.append((module, own))
            vars(module)["__deepcopy__"] = partial(_copy_outside, module, own)
            vars(module)["forward"] = self._forward_of(module)

    def leave(self) -> None:
        """Put back what was there."""
        while self._placed:
            _take_out(*self._placed.pop())

    def close(self) -> None:
        """Forget the modules."""
        self._made.clear()

    def _forward_of(self, module: nn.Module) -> Forward:
        own, placed = self._made.get(module, (None, None))
        if placed is None or own != module.forward:
            own = module.forward
            placed = self.instead(module, own)
            self._made[module] = (own, placed)
        return placed


def _take_out(module: nn.Module, own: Mapping[str, Any]) -> None:
    """Have a module as it was, with what it had of its own."""
    for name in _PLACED:
        vars(module).pop(name, None)
    vars(module).update(own)


def _copy_outside(module: nn.Module, own: Mapping[str, Any], memo: dict[int, Any]) -> nn.Module:
    """A deep copy, made inside a forward, of the module as it is outside.

    What is placed would otherwise go into the copy, and call the module it was made for.
    """
    placed = {name: vars(module)[name] for name in _PLACED}
    _take_out(module, own)
    try:
        return copy.deepcopy(module, memo)
    finally:
        vars(module).update(placed)
