"""Which formats the names of a function held, line by line, in a replay of the failing step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ampwise.formats import dtype_name
from ampwise.numerics.remedy.patches.site import OTHER
from ampwise.step.compiled import eager
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

Seen = dict[int, dict[str, set[str]]]


def formats_at(
    step: Replayable, stash: Stash, file: str, line: int, names: Collection[str]
) -> Seen:
    """What dotted names held just before each line of the function around a line ran.

    Parameters
    ----------
    names
        Such as ``x`` and ``self.weight``; what has to be computed first is left out.
    """
    seen: Seen = {}
    with eager(step.models):
        step.replay(stash, around=lambda: _watched(file, line, names, seen), backward=False)
    return seen


def called_from(step: Replayable, stash: Stash, file: str, line: int) -> int | None:
    """The line of the same file that calls the function around a line; None where none does."""
    found: list[int] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or found or not _holds(frame.f_code, file, line):
            return
        above = frame.f_back
        while above is not None and above.f_code.co_filename != file:
            above = above.f_back
        if above is not None:
            found.append(above.f_lineno)

    with eager(step.models):
        step.replay(stash, around=lambda: _traced(enter), backward=False)
    return found[0] if found else None


@contextmanager
def _watched(file: str, line: int, names: Collection[str], seen: Seen) -> Generator[None]:
    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            note(frame)
        return look

    def note(frame: FrameType) -> None:
        here = seen.setdefault(frame.f_lineno, {})
        for name in names:
            if (kind := _kind(frame, name)) is not None:
                here.setdefault(name, set()).add(kind)

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or not _holds(frame.f_code, file, line):
            return None
        return look

    with _traced(enter):
        yield


@contextmanager
def _traced(enter: Callable[[FrameType, str, Any], Any]) -> Generator[None]:
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _holds(code: CodeType, file: str, line: int) -> bool:
    return code.co_filename == file and any(each == line for *_, each in code.co_lines())


def _kind(frame: FrameType, name: str) -> str | None:
    """The format of a tensor, `OTHER` for anything else; None for what is not there."""
    first, *rest = name.split(".")
    if first not in frame.f_locals:
        return None
    value = frame.f_locals[first]
    for part in rest:
        if isinstance(value, Tensor) or part not in (stored := _stored(value, part)):
            return None
        value = stored[part]
    if isinstance(value, Tensor):
        return dtype_name(value.dtype)
    return OTHER


def _stored(value: Any, part: str) -> dict[str, Any]:
    """Where an object keeps an attribute; asking for it could run code."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for home in (value._parameters, value._buffers, value._modules):
            if part in home:
                return home  # pyright: ignore[reportReturnType]
    return own
