"""What a replay of the failing step shows of functions: who calls them, and the formats in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ampwise.formats import dtype_name
from ampwise.numerics.remedy.patches.site import LIST_OF, OTHER
from ampwise.step.compiled import eager
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

Seen = dict[int, dict[str, set[str]]]


@dataclass(frozen=True)
class Wanted:
    """A line, and names of the function around it; what has to be computed first is left out."""

    file: str
    line: int
    names: Collection[str]


def formats_at(step: Replayable, stash: Stash, wanted: Sequence[Wanted]) -> list[Seen]:
    """What dotted names, such as ``x`` and ``self.weight``, held just before each line ran."""
    seen: list[Seen] = [{} for _ in wanted]
    with eager(step.models):
        step.replay(stash, around=lambda: _watched(wanted, seen), backward=False)
    return seen


@dataclass(frozen=True)
class CallAt:
    """A call that led to a fault.

    Attributes
    ----------
    line
        Where it runs.
    end
        Line and column where the call ends in its file.
    among_layers
        Whether the function that it is in runs layers.
    """

    file: str
    line: int
    end: tuple[int, int]
    among_layers: bool


@dataclass
class Led:
    """How a step came to the function of a fault, the first time.

    Attributes
    ----------
    calls
        Of the user's own code, the innermost first.
    functions
        The user's own that ran no layer, by file and a line, in the order in which they began.
    at
        Which of them has the fault; None where that one ran layers.
    helpers
        Where they are called from, by file: ends of calls.
    before
        Those of `functions` that began before that of the fault, and are not on the way to it.
    called
        Which of them a call is of, by its file and end.
    earlier
        All of the user's own that began before that of the fault, with layers or without, the
        nearest last.
    """

    calls: list[CallAt] = field(default_factory=list[CallAt])
    functions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    at: int | None = None
    helpers: dict[str, set[tuple[int, int]]] = field(
        default_factory=dict[str, set[tuple[int, int]]]
    )
    before: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    called: dict[tuple[str, tuple[int, int]], tuple[str, int]] = field(
        default_factory=dict[tuple[str, tuple[int, int]], tuple[str, int]]
    )
    earlier: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])


def led_to(
    step: Replayable, stash: Stash, file: str, line: int, is_own: Callable[[str], bool]
) -> Led:
    """How a step comes to the function around a line.

    Parameters
    ----------
    is_own
        Whether a file's functions are the user's own.
    """
    watcher = _Calls(file, line, is_own)
    with eager(step.models):
        step.replay(stash, around=lambda: _traced(watcher.enter), backward=False)
    return watcher.led


class _Calls:
    """Notes calls between functions of the user's own, and which of them run layers."""

    def __init__(self, file: str, line: int, is_own: Callable[[str], bool]) -> None:
        self._file, self._line = file, line
        self._is_own = cache(is_own)
        self._calls: list[tuple[CodeType, int, tuple[int, int]]] = []
        self._called: dict[CodeType, set[tuple[str, tuple[int, int]]]] = {}
        self._with_layers: set[CodeType] = set()

    @property
    def led(self) -> Led:
        """What they show together."""
        found = Led(
            [
                CallAt(code.co_filename, line, end, code in self._with_layers)
                for code, line, end in self._calls
            ]
        )
        leading, before = {code for code, *_ in self._calls}, list[tuple[str, int]]()
        for code in self._called:
            if _holds(code, self._file, self._line):
                break
            if not code.co_name.startswith("<"):
                found.earlier.append((code.co_filename, max(_lines(code))))
        for code, called in self._called.items():
            if code in self._with_layers:
                continue
            for file, end in called:
                found.helpers.setdefault(file, set()).add(end)
            if code.co_name.startswith("<"):  # a lambda, or a comprehension
                continue
            here = code.co_filename, max(_lines(code))
            found.called.update(dict.fromkeys(called, here))
            if _holds(code, self._file, self._line):
                found.at, found.before = len(found.functions), before
            found.functions.append(here)
            if code not in leading:
                before = [*before, here]
        return found

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        """A function is called."""
        if event != "call":
            return
        code = frame.f_code
        if self._is_own(code.co_filename):
            above = list(self._own_above(frame))
            called = self._called.setdefault(code, set())
            if above:
                called.add((above[0].f_code.co_filename, _end(above[0])))
            if not self._calls and _holds(code, self._file, self._line):
                self._calls = [(each.f_code, each.f_lineno, _end(each)) for each in above]
        if code.co_name == "forward" and _has_weights(frame.f_locals.get("self")):
            self._with_layers.update(each.f_code for each in self._own_above(frame))
            self._with_layers.add(code)

    def _own_above(self, frame: FrameType) -> Iterator[FrameType]:
        above = frame.f_back
        while above is not None:
            if self._is_own(above.f_code.co_filename):
                yield above
            above = above.f_back


def _has_weights(module: Any) -> bool:
    return isinstance(module, nn.Module) and bool(module._parameters)


def _end(frame: FrameType) -> tuple[int, int]:
    """Where the expression ends that a function is at."""
    at = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return at[1] or 0, at[3] or 0


@contextmanager
def _watched(wanted: Sequence[Wanted], seen: Sequence[Seen]) -> Generator[None]:
    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call":
            return None
        here = [
            (each, found)
            for each, found in zip(wanted, seen, strict=True)
            if _holds(frame.f_code, each.file, each.line)
        ]

        def look(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                for each, found in here:
                    _note(frame, each.names, found)
            return look

        return look if here else None

    with _traced(enter):
        yield


def _note(frame: FrameType, names: Collection[str], seen: Seen) -> None:
    here = seen.setdefault(frame.f_lineno, {})
    for name in names:
        if (kind := _kind(frame, name)) is not None:
            here.setdefault(name, set()).add(kind)


@contextmanager
def _traced(enter: Callable[[FrameType, str, Any], Any]) -> Generator[None]:
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _holds(code: CodeType, file: str, line: int) -> bool:
    return code.co_filename == file and line in _lines(code)


def _lines(code: CodeType) -> set[int]:
    return {each for *_, each in code.co_lines() if each is not None}


def _kind(frame: FrameType, name: str) -> str | None:
    """The format of a tensor, or of all in a list; `OTHER` for anything else, None for nothing."""
    first, *rest = name.split(".")
    names = frame.f_locals if first in frame.f_locals else frame.f_globals
    if first not in names:
        return None
    value = names[first]
    for part in rest:
        if isinstance(value, Tensor) or part not in (stored := _stored(value, part)):
            return None
        value = stored[part]
    if isinstance(value, Tensor):
        return dtype_name(value.dtype)
    if isinstance(value, list | tuple):
        several: Sequence[Any] = value
        formats = {dtype_name(e.dtype) if isinstance(e, Tensor) else "" for e in several}
        return f"{LIST_OF}{formats.pop()}" if len(formats) == 1 and "" not in formats else OTHER
    return OTHER


def _stored(value: Any, part: str) -> dict[str, Any]:
    """Where an object keeps an attribute; asking for it could run code."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for home in (value._parameters, value._buffers, value._modules):
            if part in home:
                return home  # pyright: ignore[reportReturnType]
    return own
