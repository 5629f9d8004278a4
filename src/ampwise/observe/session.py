"""Which step is open. All other files report to it what happens, and it tells the listeners.

Once it is known which optimizers take part, a step ends with the last of them and not only when the
next one has begun.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self
from weakref import WeakSet

from ampwise.errors import kind_and_words
from ampwise.observe.listener import Listener
from ampwise.observe.result import NotObserved
from ampwise.observe.steps import Attempt, Segment, Step
from ampwise.step.replay import onlookers

_FORGOTTEN = 20
"""Steps after which an optimizer that no longer updates is not waited for."""


class Uncut:
    """A region that a signal does not cut in two: what it calls for waits until the end.

    Else the line of a step whose listeners were being told would be lost.
    """

    def __init__(self) -> None:
        self._deep = 0
        self._waiting: Callable[[], None] | None = None

    @property
    def entered(self) -> bool:
        """Whether it is open."""
        return self._deep > 0

    def then(self, call: Callable[[], None]) -> None:
        """Make a call at its end."""
        self._waiting = call

    def __enter__(self) -> Self:
        self._deep += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._deep -= 1
        if self._waiting is not None and not self._deep:
            call, self._waiting = self._waiting, None
            call()


class Session:
    """Where the script is.

    Attributes
    ----------
    active
        Whether what happens is the script's: not in our own replays, nor in forked processes.
    raced
        Whether the open step is in a precision that the race has put in place of the script's.
    in_backward
        Whether backward is running: what is called then is recomputed.
    spent_s
        Time that listeners took so far, but for what they did aside.
    failed
        Listeners that raised, and are told nothing more.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.debug = debug
        self.failed: list[NotObserved] = []
        self.active = True
        self.raced = False
        self.in_backward = False
        self.spent_s = self._spent_before_s = 0.0
        self.step = Step(1)
        self.segment = Segment()
        self._listeners: list[Listener] = []
        self._verbs: dict[str, list[Callable[..., None]]] = {}
        self._last_seen: dict[int, int] = {}
        self._repeated = False
        self._since = time.perf_counter()
        self._aside_s = 0.0
        self._uncut = Uncut()
        _sessions.add(self)
        onlookers.add(self)

    def listen(self, listener: Listener) -> None:
        """Tell it what happens from now on."""
        self._listeners.append(listener)
        self._verbs.clear()

    def tell(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Call a verb of every listener that has it; one that fails is told nothing more."""
        told = self._verbs.get(verb)
        if told is None:
            told = self._told(verb)
        if not told:
            return
        began, aside_s = time.perf_counter(), self._aside_s
        with self._uncut:
            for each in told:
                try:
                    each(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the report says it; the script goes on
                    self._drop(each, error)
        self.spent_s += time.perf_counter() - began - (self._aside_s - aside_s)

    def _told(self, verb: str) -> list[Callable[..., None]]:
        """Who has a verb; looked up once, as most verbs come in every step."""
        own = [each for each in self._listeners if verb in _overridden(type(each))]
        told = self._verbs[verb] = [getattr(each, verb) for each in own]
        return told

    @contextmanager
    def aside(self) -> Generator[None]:
        """Inside, nothing is the script's, and the time is not its step's."""
        began, before = time.perf_counter(), self.active
        self.active = False
        try:
            yield
        finally:
            self.active = before
            if before:  # else it is within another one
                self._aside_s += time.perf_counter() - began

    def watched(self) -> None:
        """The open step is slowed down by being looked at."""
        self.step.watched = True

    def whole(self, call: Callable[[], None]) -> None:
        """Make a call now, or once all listeners know what happens; one that is aside may last."""
        if self._uncut.entered and self.active:
            self._uncut.then(call)
        else:
            call()

    def attempt(self, attempt: Attempt) -> None:
        """An update was made or skipped; ends the segment, and maybe the step."""
        with self._uncut:
            self._attempt(attempt)

    def _attempt(self, attempt: Attempt) -> None:
        now = time.perf_counter()
        key = id(attempt.optimizer)
        if self._last_seen.get(key) == self.step.number:
            self._repeated = True
            self._end_step()
        segment, self.segment = self.segment, Segment()
        segment.seconds = now - self._since - self._aside_s
        segment.spent_s, self._spent_before_s = self.spent_s - self._spent_before_s, self.spent_s
        self._since, self._aside_s = now, 0.0
        self.step.attempts.append(attempt)
        self.step.segments.append(segment)
        self._last_seen[key] = self.step.number
        self.tell("attempted", attempt)
        if self._repeated and self._complete():
            self._end_step()

    def end_step(self) -> None:
        """An iteration is over, as its loop says, or the script is; it counts if it has updates."""
        if self.step.attempts:
            with self._uncut:
                self._end_step()

    def _drop(self, verb: Any, error: Exception) -> None:
        self._listeners.remove(verb.__self__)
        self._verbs.clear()
        name = type(verb.__self__).__name__
        self.failed.append(NotObserved(name, f"{kind_and_words(error)} (a bug in ampwise)"))
        if self.debug:
            traceback.print_exception(error)

    def _complete(self) -> bool:
        """Whether every optimizer that takes part these days has updated in the open step."""
        number = self.step.number
        return all(e == number or e < number - _FORGOTTEN for e in self._last_seen.values())

    def _end_step(self) -> None:
        ended, self.step = self.step, Step(self.step.number + 1)
        self.tell("step_ends", ended)


_sessions: WeakSet[Session] = WeakSet()


def _leave() -> None:
    """In a forked process, where nothing is observed."""
    for each in _sessions:
        each.active = False


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_leave)


def _overridden(kind: type[Listener]) -> set[str]:
    """Verbs that a class has of its own."""
    own = [vars(each) for each in kind.__mro__ if each not in (Listener, object)]
    return {name for each in own for name in each if hasattr(Listener, name)}
