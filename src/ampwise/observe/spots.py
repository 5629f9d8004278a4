"""Lines from which a script calls torch, and calls made again as if from there.

A replay calls modules and functions by itself, not by the script's code. Whoever asks the stack
where an operation comes from has to find the script's line there all the same. So the call is made
by a tiny function that is compiled under the name of the script's file, with its lines in the same
places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ampwise.places import kind_of


class Spot(NamedTuple):
    """A line, and the first and last one of the function that it is in."""

    file: str
    line: int
    first: int
    last: int

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function from this line."""
        return _caller(self)(function, args, kwargs)


Spots = tuple[Spot, ...]
"""The line that is the user's, and before it the one of a library's that it called, if any."""


def spots_here(frame: FrameType | None) -> Spots:
    """Where code is called from, from a frame outwards."""
    library: Spots = ()
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind == "user":
            return (*library, _spot(frame))
        if kind == "library" and not library:
            library = (_spot(frame),)
        frame = frame.f_back
    return library


def callers_spots() -> Spots:
    """`spots_here` of whoever called the function that asks."""
    return spots_here(sys._getframe(2))


def call_from(spots: Spots, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function from there."""
    if not spots:
        return function(*args, **kwargs)
    *rest, user = spots
    return user.call(call_from, (tuple(rest), function, args, kwargs), {})


def _spot(frame: FrameType) -> Spot:
    return Spot(frame.f_code.co_filename, frame.f_lineno, *_lines(frame.f_code))


@cache
def _lines(code: CodeType) -> tuple[int, int]:
    lines = [line for *_, line in code.co_lines() if line]
    return min(lines), max(lines)


@cache
def _caller(spot: Spot) -> Callable[..., Any]:
    """A function in the spot's file that makes a call in its line."""
    first, line = max(spot.first, 1), max(spot.line, 1)
    text = "\n" * (first - 1) + "def spot(function, args, kwargs):"
    text += "\n" * (line - first) + " result = function(*args, **kwargs)"
    text += ("\n" * (spot.last - line) or ";") + " return result\n"
    made: dict[str, Any] = {}
    exec(compile(text, spot.file, "exec", dont_inherit=True), made)  # noqa: S102 - our own text
    return made["spot"]
