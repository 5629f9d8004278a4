"""The roll of ranks: what each last said of itself, by way of the store, and who is missing.

A store can block for ever, when the process that holds it is frozen. So one thread does nothing
but talk to it; everyone else looks at what that thread has last seen.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ampwise.distributed.words import spell

ENDED = "ended"
"""`Record.end` of a rank that came to its end as planned."""

FOLLOWED = "followed"
"""`Record.end` of a rank that failed because another did."""

_VERDICT = "verdict"
_FAREWELL_S = 2.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank says of itself.

    Attributes
    ----------
    count
        Grows with every word: one that stays the same is of a process that is gone or frozen.
    pid, host
        Its process.
    pids
        What its process numbers are numbers of; empty where processes cannot be looked at.
    step, doing
        From its last beat.
    idle_s
        Time since then.
    limit_s
        How long that may be.
    paused
        Whether it is in a phase with a limit of its own, or stopped by a debugger.
    place
        Where it stands; empty as long as it goes on.
    waits
        Whether it waits for others there.
    end
        Empty, `ENDED`, `FOLLOWED` or what it failed of.
    """

    count: int = 0
    pid: int = 0
    host: str = ""
    pids: str = ""
    step: int = 0
    doing: str = ""
    idle_s: float = 0.0
    limit_s: float = 0.0
    paused: bool = False
    place: str = ""
    waits: bool = False
    end: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's last record, and for how long it has said nothing since."""

    record: Record
    silent_s: float = 0.0


class Roll:
    """Talks to the store, in a thread of its own.

    Parameters
    ----------
    store
        Shared by all ranks, and by nobody else's keys.
    rank, size
        This process's number, and how many there are.
    tick_s
        Time between two words.

    Attributes
    ----------
    mine
        What is said next; anyone may set it.
    look
        Whether to read what the others say. Off, the store has one small write a tick.
    proposal
        Set it to propose a verdict; the first one proposed by any rank is everyone's.
    verdict
        What was decided; None before.
    rounds
        Grows as long as the store answers.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, tick_s: float) -> None:
        self._store, self._rank, self._size, self._tick_s = store, rank, size, tick_s
        self.mine = Record(pid=os.getpid(), host=socket.gethostname(), pids=_pids())
        self.look = False
        self.proposal: str | None = None
        self.verdict: str | None = None
        self.rounds = 0
        self._seen: dict[int, Seen] = {}
        self._wake = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(target=self._talk, name="ampwise-roll", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        """Whether the store is gone."""
        return not self._thread.is_alive()

    @property
    def seen(self) -> Mapping[int, Seen]:
        """The other ranks, as far as they were ever seen."""
        return dict(self._seen)

    def look_now(self) -> None:
        """Read what the others say without waiting for the next tick."""
        self.look = True
        self._wake.set()

    def leave(self, record: Record) -> None:
        """Say a last word, and stop talking; gives up soon if the store does not answer."""
        self.mine, self._leaving = record, True
        self._wake.set()
        self._thread.join(_FAREWELL_S)

    def _talk(self) -> None:
        last = time.monotonic()
        try:
            while True:
                leaving = self._leaving  # before the word, so that the last one is said
                self._say()
                if leaving:
                    return
                now = time.monotonic()
                self._listen(min(now - last, 2 * self._tick_s))
                last = now
                self.rounds += 1
                self._wake.wait(min(self._tick_s, _LOOK_S) if self.look else self._tick_s)
                self._wake.clear()
        except RuntimeError:  # DistError: the store is gone, and with it all talk
            return

    def _say(self) -> None:
        record = replace(self.mine, count=self.rounds)
        self._store.set(f"rank/{self._rank}", json.dumps(asdict(record)))

    def _listen(self, elapsed_s: float) -> None:
        if self.proposal is not None:
            self.verdict = self._store.compare_set(_VERDICT, "", self.proposal).decode()
        elif self._store.check([_VERDICT]):
            self.verdict = self._store.get(_VERDICT).decode()
        # Processes are known by number even when the store is gone later.
        complete = len(self._seen) == self._size - 1
        for rank in range(self._size) if self.look or not complete else ():
            if rank != self._rank:
                self._ask(rank, elapsed_s)

    def _ask(self, rank: int, elapsed_s: float) -> None:
        before, key = self._seen.get(rank), f"rank/{rank}"
        if before is None and not self._store.check([key]):
            return
        record = Record(**json.loads(self._store.get(key)))
        silent = before is not None and before.record.count == record.count
        silent_s = before.silent_s + elapsed_s if before is not None and silent else 0.0
        self._seen[rank] = Seen(record, silent_s)


# -- who is missing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that the others wait for in vain, and why, in words."""

    ranks: tuple[int, ...]
    text: str


def lost(seen: Mapping[int, Seen], silence_s: float) -> Missing | None:
    """Ranks whose process is gone or frozen, that failed, or that ended before the others."""
    states = {r: _state(each, silence_s) for r, each in seen.items() if not each.record.end}
    if absent := {rank: state for rank, state in states.items() if state}:
        texts = [f"rank {rank} {_last(seen[rank].record)} {s}" for rank, s in absent.items()]
        return Missing(tuple(absent), "; ".join(texts))
    ends = {rank: each.record for rank, each in seen.items() if each.record.end}
    for how in ("failed", ENDED):
        gone = [rank for rank, each in ends.items() if each.end.startswith(how)]
        if not gone:
            continue
        first = min(gone, key=lambda rank: ends[rank].step)
        if how == ENDED:
            return Missing(
                tuple(gone),
                f"{spell(gone)} ended training at step {ends[first].step} while others go on: give "
                "all ranks the same number of batches",
            )
        return Missing(
            (first,), f"rank {first} at step {ends[first].step} {ends[first].end}; see its output"
        )
    return None


def hung(records: Mapping[int, Record], absent: Sequence[int], limit_s: float) -> Missing | None:
    """Ranks that do not go on; None as long as one of them still may take its time.

    Parameters
    ----------
    records
        Of all ranks that answer and have not ended.
    absent
        Ranks that were never seen.
    limit_s
        The limit that was passed.
    """
    # Whoever waits for a rank that may take longer is past its own limit, and right to wait.
    if any(
        each.idle_s < each.limit_s for each in records.values() if each.paused or not each.waits
    ):
        return None
    if absent:
        return Missing(tuple(absent), f"{spell(absent)} never came to the start of training")
    stuck = {rank: each for rank, each in records.items() if not each.waits}
    if not stuck:
        return _all_wait(records)
    earliest = min(each.step for each in stuck.values())
    ranks = [rank for rank, each in stuck.items() if each.step == earliest]
    texts = [
        f"rank {rank} has hung for {stuck[rank].idle_s:.0f} s {_at(stuck[rank])} in "
        f"{stuck[rank].place}"
        for rank in ranks
    ]
    return Missing(
        tuple(ranks),
        f"{'; '.join(texts)}{_waiting(records, ranks)}; look at that line, and if it may take so "
        f"long, raise the limit of {limit_s:g} s",
    )


def _all_wait(records: Mapping[int, Record]) -> Missing:
    """Nobody is elsewhere: ranks wait for each other, those that are behind most likely wrongly."""
    earliest = min(each.step for each in records.values())
    behind = [rank for rank, each in records.items() if each.step == earliest]
    places = "; ".join(
        f"rank {rank} {_at(each)} in {each.place}" for rank, each in sorted(records.items())
    )
    return Missing(
        tuple(behind),
        f"all ranks have waited for each other for {max(e.idle_s for e in records.values()):.0f} s "
        f"({places}): a branch that only some ranks take leads to different collectives, or a "
        "device or network hangs",
    )


def _waiting(records: Mapping[int, Record], but: Sequence[int]) -> str:
    others = [rank for rank in records if rank not in but]
    if not others:
        return ""
    return f"; {spell(others)} {'waits' if len(others) == 1 else 'wait'} for it"


def _at(record: Record) -> str:
    return f"at step {record.step}" + (f" ({record.doing})" if record.doing else "")


def _last(record: Record) -> str:
    return f"(process {record.pid} on {record.host}, last seen {_at(record)})"


def _state(seen: Seen, silence_s: float) -> str:
    """What has become of a process that should be there; empty if it is."""
    letter = _process_letter(seen.record)
    if letter in ("gone", "Z", "X"):
        return (
            "is gone without a word: it was killed or crashed; look at its output, and in the "
            "kernel's log for the out-of-memory killer"
        )
    if letter in ("T", "t"):
        return f"is stopped: `kill -CONT {seen.record.pid}` lets it go on, if the others still wait"
    if seen.silent_s <= silence_s:
        return ""
    return (
        f"has not answered for {seen.silent_s:.0f} s: it is gone, frozen, cut off, or stuck in "
        "compiled code that keeps the interpreter's lock; look at that process and its machine"
    )


def _process_letter(record: Record) -> str:
    """State of a process on this machine as Linux writes it, or ``gone``; empty if unknown."""
    if not record.pids or record.pids != _pids():
        return ""
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text()
    except OSError:
        return "gone"
    return stat.rpartition(")")[2].split()[0]


def _pids() -> str:
    """The namespace of process numbers: of this boot of this machine, and of this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


# -- the store -------------------------------------------------------------------------------------


def prefixed(store: dist.Store, prefix: str) -> dist.Store:
    """A store for keys of one's own, by a connection of one's own where torch can make one."""
    clone: Any = getattr(store, "clone", None)
    return dist.PrefixStore(prefix, clone() if clone is not None else store)
