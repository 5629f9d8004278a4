"""When a rank hangs, all others wait in a collective for ever: this ends it, and says who it was.

Every rank has a thread that sees whether its training thread goes on, and tells the others by the
store (`roll`). After half of the limit without a beat it also says where the training thread
stands; after all of it, it looks at what the others said:

    a process gone or frozen (killed, SIGSTOP), or ended     that is the one
    a rank that stands anywhere but in a collective          that is the one, if it is past its own
                                                             limit; the earliest step first
    all in collectives                                       they wait for each other

The first rank to know proposes its verdict, and all ranks take that one: each calls `last_words`,
writes one line on stderr, and ends its process with exit code 3, since its training thread cannot
be woken from a collective.

What it cannot see, or leaves alone:

- A beat is progress: a rank that beats but never comes to the collective is waited for.
- A thread stuck in compiled code that keeps the interpreter's lock stops this rank's watchdog, too.
  The other ranks' then find it silent, and say so.
- Backward counts as a collective, since it contains them: a rank stuck in backward is named only
  where a Python function of the user's is on its stack (a hook, an autograd function). On
  accelerators so does waiting for the device; those rules have not been tried on one.
- A breakpoint of pdb or pydevd (VS Code, PyCharm) pauses the watch on all ranks. A debugger that
  stops whole processes (gdb) does so for its own rank, whose clock counts only ticks it has seen;
  the others find it frozen. Use a limit of ``math.inf`` then.
- Without `Store.clone` (older torch) the store's one connection is shared: another thread that
  blocks in the store blocks the talk of this rank.
- Without torchrun rank 0 holds the store. When its process dies or freezes, processes on the same
  machine still see what has become of each other; across machines it is only said that the store
  does not answer.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch.distributed as dist

from ampwise.distributed.launch import Launch, is_lost
from ampwise.distributed.roll import ENDED, FOLLOWED, Missing, Roll, hung, lost, prefixed
from ampwise.distributed.whereabouts import Place, place_of
from ampwise.errors import EXIT_RUN, LostRankError, UsageError, in_one_line, kind_and_words
from ampwise_lint.base import neutral
from ampwise_lint.base.ending import on_sigterm

MOST_TICK_S = 2.0
_LAST_WORDS_S = 5.0
_PAUSE = 10
_LOOK_S = 0.1
_NO_STORE = (
    "the store does not answer: the process that holds it (rank 0, or torchrun) is gone or frozen"
)
_number = itertools.count()


class NoWatchdog:
    """The watchdog of a process alone, which nobody waits for."""

    def beat(self, step: int, doing: str = "") -> None:
        """The process goes on."""

    def paused(self) -> AbstractContextManager[None]:
        """A phase that may take longer."""
        return nullcontext()


class Watchdog(NoWatchdog):
    """Watches the thread that enters it, on each of several ranks.

    Parameters
    ----------
    store
        Any that all ranks share. All make the same number of watchdogs.
    rank, size
        This process's number, and how many there are.
    limit_s
        How long a rank may go without a `beat`. It must cover the longest step, the first one
        with its compilation included.
    last_words
        Called with the verdict before the process ends, from another thread, for 5 s at most.

    Raises
    ------
    UsageError
        For a limit that is not above 0.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        limit_s: float,
        last_words: Callable[[str], object] = lambda _text: None,
    ) -> None:
        if not limit_s > 0:
            raise UsageError(f"limit_s: expected seconds above 0, got {limit_s}")
        self._store = prefixed(store, f"ampwise/watchdog/{next(_number)}")
        self._rank, self._size, self._limit_s = rank, size, limit_s
        self._last_words = last_words
        self._tick_s = min(limit_s / 10, MOST_TICK_S)
        self._silence_s = max(4 * self._tick_s, min(limit_s, 60.0) / 4)
        self._beat = (0, "start")
        self._pause_s: float | None = None
        self._explaining = False
        self._closed = threading.Event()
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._roll = Roll(self._store, self._rank, self._size, self._tick_s)
        self._thread = threading.Thread(target=self._watch, name="ampwise-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say goodbye: the others learn that this rank ended, or what it failed of."""
        self._closed.set()
        self._thread.join()  # at once, unless it is about to end the process
        end = ENDED
        if error is not None:
            end = f"failed: {kind_and_words(error)}"
            if isinstance(error, LostRankError) or is_lost(error):
                end = FOLLOWED
        step, doing = self._beat
        self._roll.leave(replace(self._roll.mine, step=step, doing=doing, end=end))

    def beat(self, step: int, doing: str = "") -> None:
        """Training goes on; costs an assignment.

        Parameters
        ----------
        step
            The step that begins.
        doing
            What it does now, for the message: ``data``, ``step``.
        """
        self._beat = (step, doing)

    @contextmanager
    def paused(self, limit_s: float | None = None) -> Generator[None]:
        """A phase that may take longer: evaluation, a checkpoint; the others wait as long.

        Parameters
        ----------
        limit_s
            Its own limit; default ten times the usual one.
        """
        before = self._pause_s
        self._pause_s = _PAUSE * self._limit_s if limit_s is None else limit_s
        self.beat(*self._beat)
        try:
            yield
        finally:
            self._pause_s = before
            self.beat(*self._beat)

    def explain(self, error: BaseException) -> LostRankError | None:
        """Which rank is behind a failed collective; None if that is not known, or it is none.

        To be called before the watchdog is left. Waits some seconds for others to be found missing
        (at once for a process on this machine), and does not return when a verdict is reached
        meanwhile, which ends the process.
        """
        if not is_lost(error):
            return None
        self._explaining = True
        self._roll.look_now()
        # A rank's goodbye comes before its end, but may be read after it: look again.
        if self._missing(rounds=2) and (missing := self._missing(rounds=2)):
            step, _ = self._beat
            return LostRankError(
                f"{missing.text}; so rank {self._rank} could not go on at step {step} "
                f"({in_one_line(error)})",
                missing.ranks,
            )
        if self._roll.broken:
            return LostRankError(f"{_NO_STORE} ({in_one_line(error)})")
        return None

    def _missing(self, rounds: int) -> Missing | None:
        """Who is lost, by records read from now on; waits until someone is found, or hardly can."""
        since, patience_s = self._roll.rounds, 2 * self._silence_s
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._ending.is_set():
                self._thread.join()
            fresh = self._roll.rounds >= since + rounds or self._roll.broken
            if fresh and (missing := lost(self._roll.seen, self._silence_s)) is not None:
                return missing
            time.sleep(_LOOK_S)
        return None

    # -- the watching thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        beat, idle_s, last = self._beat, 0.0, time.monotonic()
        rounds, mute_s = 0, 0.0
        while not self._closed.wait(self._tick_s):
            # Ticks it has seen, not time: a process that was stopped as a whole was not idle.
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * self._tick_s), now
            idle_s = idle_s + elapsed if beat is self._beat else 0.0
            beat = self._beat
            mute_s = mute_s + elapsed if rounds == self._roll.rounds else 0.0
            rounds = self._roll.rounds
            if self._roll.verdict is not None:
                self._end(self._roll.verdict)
            if self._report(idle_s):
                idle_s = 0.0
            if idle_s >= self._limit() and (missing := self._judge(mute_s)) is not None:
                self._roll.proposal = missing.text
                if mute_s > self._silence_s:
                    self._end(missing.text)

    def _limit(self) -> float:
        return self._limit_s if self._pause_s is None else self._pause_s

    def _report(self, idle_s: float) -> bool:
        """Say how this rank is; whether a debugger has stopped it."""
        step, doing = self._beat
        limit_s = self._limit()
        place = self._place() if idle_s >= limit_s / 2 else Place("", waits=False, debugged=False)
        self._roll.look = self._explaining or idle_s >= limit_s / 2
        self._roll.mine = replace(
            self._roll.mine,
            step=step,
            doing=doing,
            idle_s=idle_s,
            limit_s=math.inf if place.debugged else limit_s,
            paused=self._pause_s is not None or place.debugged,
            place=place.text,
            waits=place.waits,
        )
        return place.debugged

    def _place(self) -> Place:
        return place_of(sys._current_frames()[self._watched])

    def _judge(self, mute_s: float) -> Missing | None:
        """Who is to blame; None as long as someone may take longer."""
        seen = self._roll.seen
        if (missing := lost(seen, self._silence_s)) is not None:
            return replace(missing, text=f"{missing.text}; the others have waited for it in vain")
        if mute_s > self._silence_s:
            return Missing(
                (),
                f"rank {self._rank} has waited for {self._roll.mine.idle_s:.0f} s in "
                f"{self._roll.mine.place}, and {_NO_STORE}",
            )
        everyone = {r: each.record for r, each in seen.items()} | {self._rank: self._roll.mine}
        absent = [rank for rank in range(self._size) if rank not in everyone]
        records = {rank: each for rank, each in everyone.items() if not each.end}
        return hung(records, absent, self._limit())

    def _end(self, verdict: str) -> None:
        """Last words, one line, and the end of the process, which nothing else could bring."""
        self._ending.set()
        speaker = threading.Thread(target=self._speak, args=(verdict,), daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_S)
        # sys.stderr may be locked by whoever hangs.
        os.write(2, f"ampwise: {neutral.line(verdict)}\n".encode())
        # The others read the verdict at their next tick, and some may hold the store, or a socket
        # whose end would tell them something else first.
        time.sleep(3 * self._tick_s)
        os._exit(EXIT_RUN)

    def _speak(self, verdict: str) -> None:
        try:
            self._last_words(verdict)
        finally:
            sys.stdout.flush()


@contextmanager
def watched(
    store: dist.Store | None,
    me: Launch,
    limit_s: float,
    last_words: Callable[[str], object] = lambda _text: None,
) -> Generator[NoWatchdog]:
    """Context: a process that hangs or is lost ends all, and is named; see `Watchdog`.

    Parameters
    ----------
    store
        Where the processes met; None alone.

    Raises
    ------
    LostRankError
        Instead of the error of a collective that another rank has left.
    """
    if store is None:
        yield NoWatchdog()
        return
    with Watchdog(store, me.rank, me.size, limit_s, last_words) as dog:
        try:
            yield dog
        except Exception as error:
            with on_sigterm(signal.SIG_IGN):
                lost = dog.explain(error)
            if lost is None:
                raise
            raise lost from error
