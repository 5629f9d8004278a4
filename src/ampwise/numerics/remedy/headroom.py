"""What a patch leaves near the end of float16, beside what it mends.

Of two sums in a function that grow alike one overflows first. A patch that widens it alone holds
for the steps that it is tried on, and not for those that come later.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Sequence
from typing import Any

import torch

from ampwise.formats import FLOAT16
from ampwise.numerics.observe.operations import Operation, OperationMode, written
from ampwise.places import Places, placing
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

_NEAR = 0.25
"""Share of the format's largest number above which a value is near it."""


def function_at(file: str, line: int) -> str:
    """Name of the innermost function around a line; empty outside of any."""
    found = function_around(file, line)
    return "" if found is None else found.name


def function_around(file: str, line: int) -> ast.FunctionDef | None:
    """The innermost function around a line; None outside of any, or where it cannot be read."""
    found = [each for each in _functions(file) if each.lineno <= line <= (each.end_lineno or 0)]
    return max(found, key=lambda each: each.lineno, default=None)


def near_the_end(step: Replayable, stash: Stash, at: Sequence[Any]) -> str:
    """What a function of a step gives in float16 that is near its largest number; empty if nothing.

    Parameters
    ----------
    at
        The function's file and name.
    """
    file, name = at
    named = [each for each in _functions(file) if each.name == name]
    lines = {line for each in named for line in range(each.lineno, (each.end_lineno or 0) + 1)}
    if not lines:
        return ""
    with placing(step.models) as places:
        heights = _Heights(places, file, lines)
        step.replay(stash, around=lambda: heights, backward=False)
    if heights.largest < _NEAR * FLOAT16.max:
        return ""
    return f"line {heights.line} comes to {heights.largest:,.0f} of {FLOAT16.max:,.0f}"


def _functions(file: str) -> list[ast.FunctionDef]:
    """Functions of a file as it is read in this process."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]


class _Heights(OperationMode):
    """Looks for the largest finite result in float16 of some lines."""

    def __init__(self, places: Places, file: str, lines: set[int]) -> None:
        super().__init__()
        self.largest, self.line = 0.0, 0
        self._places, self._file, self._lines = places, file, lines

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        result = op.func(*args, **kwargs)
        made = [] if op.empty else written(op, args, kwargs, result)
        narrow = [each for each in made if each.dtype == torch.float16 and each.numel()]
        place = self._places.here()
        if narrow and place.file == self._file and place.line in self._lines:
            largest = max(float(each.detach().abs().max()) for each in narrow)
            if self.largest < largest < math.inf:
                self.largest, self.line = largest, place.line
        return result
