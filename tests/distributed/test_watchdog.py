"""Ranks that hang, freeze, die or end: who is named, by whom, and how soon (real processes)."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ampwise.distributed.roll import ENDED, FOLLOWED, Record, Seen, hung, lost
from ampwise.distributed.watchdog import Watchdog
from ampwise.errors import UsageError
from tests.distributed.processes import LIMIT_S, Two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Any]:
    started: list[Two] = []

    def start(what: str, limit_s: float = LIMIT_S) -> Two:
        started.append(Two(what, limit_s, tmp_path))
        return started[0]

    yield start
    started[0].close()


def only_line(err: str) -> str:
    lines = [each for each in err.splitlines() if each.startswith("ampwise: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("loader", "(data) in hanging.py:{} `time.sleep(3600)`"),
        ("forward", "(step) in hanging.py:{} `"),
    ],
)
def test_a_rank_that_hangs_is_named_on_all_with_its_line(two: Any, what: str, place: str) -> None:
    both = two(what)
    both.wait_for("step-1-5")
    for rank in range(2):
        ended = both.ended(rank)
        line = only_line(ended.err)
        assert ended.code == 3
        assert ended.seconds < 4 * LIMIT_S
        head, _, tail = place.partition("{}")
        assert line.startswith("ampwise: rank 1 has hung for ")
        assert f" s at step 5 {head}" in line
        assert tail in line
        assert "; rank 0 waits for it; look at that line" in line
        assert f"raise the limit of {LIMIT_S:g} s" in line
        assert ended.words == line.removeprefix("ampwise: ")


def test_a_stopped_rank_is_named_by_the_other(two: Any) -> None:
    both = two("killed")
    both.wait_for("ready")
    time.sleep(1)  # a few ticks, for its last word
    both.signal(1, signal.SIGSTOP)
    ended = both.ended(0)
    line = only_line(ended.err)
    assert ended.code == 3
    assert ended.seconds < 4 * LIMIT_S
    pid = both.processes[1].pid
    assert line.startswith(f"ampwise: rank 1 (process {pid} on ")
    assert "last seen at step 5 (data)) is stopped: `kill -CONT" in line


def test_a_killed_rank_is_named_within_seconds(two: Any) -> None:
    both = two("killed", 3600)
    both.wait_for("ready")
    both.signal(1, signal.SIGKILL)
    ended = both.ended(0)
    line = only_line(ended.err)
    assert ended.code == 3
    assert ended.seconds < 6
    assert "rank 1 (process " in line
    assert "is gone without a word: it was killed or crashed" in line
    assert "so rank 0 could not go on at step 5 (" in line


def test_the_error_of_another_rank_is_passed_on(two: Any) -> None:
    both = two("raises", 3600)
    ended = both.ended(0)
    assert only_line(ended.err).startswith(
        "ampwise: rank 1 at step 5 failed: ValueError: the image is broken; see its output; so "
        "rank 0 could not go on at step 5 ("
    )
    assert ended.code == 3
    assert "ValueError" in both.ended(1).err


def test_a_rank_with_fewer_batches_is_named(two: Any) -> None:
    both = two("short", 3600)
    ended = both.ended(0)
    assert "rank 1 ended training at step 5 while others go on" in only_line(ended.err)
    assert ended.code == 3
    assert both.ended(1).code == 0


@pytest.mark.parametrize("what", ["evaluation", "breakpoint"])
def test_a_long_phase_that_was_announced_is_no_hang(two: Any, what: str) -> None:
    both = two(what)
    for rank in range(2):
        ended = both.ended(rank)
        assert (ended.code, ended.err, ended.words) == (0, "", "")


def test_ranks_that_took_different_branches_wait_for_each_other(two: Any) -> None:
    both = two("branch")
    for rank in range(2):
        ended = both.ended(rank)
        line = only_line(ended.err)
        assert ended.code == 3
        assert "all ranks have waited for each other" in line
        assert "different collectives" in line


# -- who is it -------------------------------------------------------------------------------------


def record(step: int, idle_s: float = 20, *, waits: bool = True, **more: Any) -> Record:
    return Record(step=step, idle_s=idle_s, limit_s=20, waits=waits, place="x.py:1 `f()`", **more)


def test_the_earliest_of_those_who_do_not_wait() -> None:
    records = {0: record(12), 1: record(13, waits=False), 2: record(12, waits=False), 3: record(12)}
    found = hung(records, [], 20)
    assert found is not None
    assert found.ranks == (2,)
    assert "ranks 0, 1, 3 wait for it" in found.text


def test_nobody_is_blamed_before_its_own_limit() -> None:
    # Rank 0 has just come back from an evaluation for which rank 1 has waited all along.
    assert hung({0: record(12, 0, waits=False), 1: record(12, 500)}, [], 20) is None
    paused = record(12, 100, waits=True, paused=True)
    longer = Record(**{**{n: getattr(paused, n) for n in Record.__slots__}, "limit_s": math.inf})
    assert hung({0: longer, 1: record(12, 500)}, [], 20) is None


def test_a_rank_that_never_came() -> None:
    found = hung({0: record(1)}, [1, 2], 20)
    assert found is not None
    assert found.text == "ranks 1 and 2 never came to the start of training"


def test_silence_beats_failure_beats_an_early_end() -> None:
    seen = {
        1: Seen(record(9, end=ENDED)),
        2: Seen(record(8, end="failed: OSError: x")),
        3: Seen(record(8, end=FOLLOWED)),
        4: Seen(record(7), silent_s=9),
    }
    missing = lost(seen, 5)
    assert missing is not None
    assert missing.ranks == (4,)
    assert "has not answered for 9 s" in missing.text
    del seen[4]
    assert lost(seen, 5).ranks == (2,)  # type: ignore[union-attr]
    del seen[2]
    assert lost(seen, 5).ranks == (1,)  # type: ignore[union-attr]
    del seen[1]
    assert lost(seen, 5) is None


def test_errors_that_are_the_rank_s_own_are_not_explained() -> None:
    with Watchdog(dist.HashStore(), 0, 1, 60.0) as watchdog:
        assert watchdog.explain(ValueError("x")) is None
        assert watchdog.explain(RuntimeError("shapes do not match")) is None


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="limit_s: expected seconds above 0, got 0"):
        Watchdog(dist.HashStore(), 0, 1, 0)
