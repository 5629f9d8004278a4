"""Which step is open. All other files report to it what happens, and it tells the listeners.

A *segment* lasts from one update to the next. A step is the segments up to where an optimizer would
update a second time, so that a GAN's two updates are one step. Once it is known which optimizers
take part, a step ends with the last of them and not only when the next one has begun.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import kind_and_words
from ampwise.lines import NOWHERE, Line
from ampwise.observe.listener import Listener
from ampwise.observe.result import NotObserved

_FORGOTTEN = 20
"""Steps after which an optimizer that no longer updates is not waited for."""


@dataclass(slots=True)
class Attempt:
    """An update that was made or skipped.

    Attributes
    ----------
    skipped
        Whether it was skipped, where the host knows; else what a fused optimizer found, on the
        device: more than 0 where it skipped.
    scale
        Loss scale it was made under; None without a live scaler.
    norm
        Global L2 norm of its true gradients, before clipping; None where it is not known.
    """

    optimizer: Optimizer
    skipped: bool | Tensor
    scale: Tensor | None = None
    norm: Tensor | None = None
    line: Line = NOWHERE


@dataclass(slots=True)
class Segment:
    """What happened up to an update.

    Attributes
    ----------
    losses
        What backward was called on, unscaled, detached.
    backwards
        How often at each line.
    scaled, plain
        Backward calls on losses that a live scaler had multiplied, and on others.
    by_hand
        Whether a loss may have been scaled by other means: multiplied, or given a gradient.
    norm
        What clipping said the norm was.
    seconds, spent_s
        Time it took, and of that what observing took.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    backwards: Counter[Line] = field(default_factory=Counter[Line])
    samples: int = 0
    waited_s: float = 0.0
    scaled: int = 0
    plain: int = 0
    by_hand: bool = False
    norm: Tensor | None = None
    seconds: float = 0.0
    spent_s: float = 0.0


@dataclass(slots=True)
class Step:
    """An iteration: all updates up to the one that would be an optimizer's second.

    Attributes
    ----------
    number
        From 1; skipped ones count.
    watched
        Whether it was slowed down by being looked at.
    """

    number: int
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    segments: list[Segment] = field(default_factory=list[Segment])
    watched: bool = False

    @property
    def seconds(self) -> float:
        """Time from the update before, without what looking at it took."""
        return sum(each.seconds for each in self.segments)

    @property
    def spent_s(self) -> float:
        """What observing took of that."""
        return sum(each.spent_s for each in self.segments)

    @property
    def micro_batches(self) -> int:
        """The most often that backward was called at one line."""
        return max((max(each.backwards.values(), default=0) for each in self.segments), default=0)


class Session:
    """Where the script is.

    Attributes
    ----------
    active
        Whether what happens is the script's: not in our own replays, nor in forked processes.
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
        os.register_at_fork(after_in_child=self._leave)

    def listen(self, listener: Listener) -> None:
        """Tell it what happens from now on."""
        self._listeners.append(listener)
        self._verbs.clear()

    def tell(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Call a verb of every listener that has it; one that fails is told nothing more."""
        began, aside_s = time.perf_counter(), self._aside_s
        for each in self._told(verb):
            try:
                each(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the report says it; the script goes on
                self._drop(each, error)
        self.spent_s += time.perf_counter() - began - (self._aside_s - aside_s)

    def hears(self, verb: str) -> bool:
        """Whether anybody listens to a verb."""
        return bool(self._told(verb))

    def _told(self, verb: str) -> Sequence[Callable[..., None]]:
        told = self._verbs.get(verb)
        if told is None:
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
            self._aside_s += time.perf_counter() - began

    def watched(self) -> None:
        """The open step is slowed down by being looked at."""
        self.step.watched = True

    def attempt(self, attempt: Attempt) -> None:
        """An update was made or skipped; ends the segment, and maybe the step."""
        now = time.perf_counter()
        key = id(attempt.optimizer)
        if any(each.optimizer is attempt.optimizer for each in self.step.attempts):
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

    def finish(self) -> None:
        """The script has ended; a step with updates in it counts."""
        if self.step.attempts:
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
        oldest = self.step.number - _FORGOTTEN
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if seen >= oldest}
        made = {id(each.optimizer) for each in self.step.attempts}
        return self._last_seen.keys() <= made

    def _end_step(self) -> None:
        ended, self.step = self.step, Step(self.step.number + 1)
        self.tell("step_ends", ended)

    def _leave(self) -> None:
        self.active = False


def _overridden(kind: type[Listener]) -> set[str]:
    """Verbs that a class has of its own."""
    own = [vars(each) for each in kind.__mro__ if each not in (Listener, object)]
    return {name for each in own for name in each if hasattr(Listener, name)}
