"""What ranks conclude from what all of them put in: who differs, and who keeps the others waiting.

In a synchronous step everyone waits for the last one, so step times say nothing about who that is.
Compared is what ranks do before their backwards: data and forward. Forwards that contain
collectives wait, too: broadcast buffers of DDP, and FSDP2's gathers. There a rank's forward is
taken to have waited for the rank whose data came last; and a rank that is slow in forward under
FSDP2 holds up the others' forwards just as much, and is not found.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampwise.distributed.words import spell
from ampwise.errors import DivergedRanksError

SLOW_FACTOR = 1.3
"""So many times the others' median makes a rank slow."""

SLOW_SHARE = 0.05
"""And so much of a step: less is not worth a word."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank puts in."""

    rank: int
    steps: int
    key: int
    data_us: int
    forward_us: int
    step_us: int
    loss_scale: int
    growth_tracker: int
    checksum: int
    part_checksum: int


def compare(rows: Sequence[Row], good_at: int | None) -> None:
    """See whether ranks differ in what should be the same.

    Parameters
    ----------
    rows
        One for each rank.
    good_at
        Step at which they were last the same; None before.

    Raises
    ------
    DivergedRanksError
        When they do, with the rank that differs from most others.
    """
    for name, value in (
        ("the number of steps", lambda row: str(row.steps)),
        ("the loss scale", lambda row: _float32(row.loss_scale)),
        ("the growth tracker", lambda row: str(row.growth_tracker)),
        ("the parameters", lambda row: _hexadecimal(row.checksum)),
    ):
        _same(name, {row.rank: value(row) for row in rows}, rows, good_at)
    for key in {row.key for row in rows}:
        alike = {row.rank: _hexadecimal(row.part_checksum) for row in rows if row.key == key}
        _same("their copies of the same parameters", alike, rows, good_at)


def _same(name: str, values: dict[int, str], rows: Sequence[Row], good_at: int | None) -> None:
    counts = Counter(values.values())
    if len(counts) == 1:
        return
    usual, held_by = counts.most_common(1)[0]
    majority = 2 * held_by > len(values)
    odd = [rank for rank, value in values.items() if not majority or value != usual]
    shown = "; ".join(
        f"{spell(rank for rank in values if values[rank] == value)}: {value}" for value in counts
    )
    now = max(each.steps for each in rows)
    when = f"by step {now}" if good_at is None else f"between step {good_at} and step {now}"
    before = "an earlier run" if good_at is None else f"step {good_at} or earlier"
    suspect = (
        f"if only {spell(odd)} does so again, suspect its machine"
        if majority
        else "if there is none, suspect the machines"
    )
    raise DivergedRanksError(
        f"{spell(odd)} {'differs' if len(odd) == 1 else 'differ'} in {name} ({shown}): it happened "
        f"{when}, and from there on they train different models; go on from a checkpoint of "
        f"{before}, and look for code that changes parameters, or the step's state, on some ranks "
        f"only; {suspect}",
        ranks=odd,
    )


def _float32(bits: int) -> str:
    return str(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)))


def _hexadecimal(word: int) -> str:
    return f"checksum {word % 2**64:016x}"


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that keeps the others waiting.

    Attributes
    ----------
    rank
        Its number.
    busy_ms, others_ms
        Its time before backward, and the median of the others'.
    where
        What most of the difference is: ``data`` or ``forward``.
    share
        The difference as a part of the step.
    """

    rank: int
    busy_ms: float
    others_ms: float
    where: str
    share: float

    def text(self, step: int, windows: int) -> str:
        """It in words."""
        look = {
            "data": "between backward and the next forward, where data is loaded: give its loader "
            "more workers, or look at its disk and network",
            "forward": "in forward: look at its device's clock, heat and other processes, and at "
            "whether its batches are larger",
        }[self.where]
        return (
            f"rank {self.rank} is slow: {self.busy_ms:.3g} ms before backward against "
            f"{self.others_ms:.3g} ms on the others ({self.busy_ms / self.others_ms:.1f}x, medians "
            f"of {windows} steps up to step {step}); the others wait for it, {self.share:.0%} of "
            f"each step; most of it {look}"
        )


def slowest(rows: Sequence[Row], *, forward_waits: bool) -> Slow | None:
    """The rank that took longest, if it is slow: much longer than the others, and it matters."""
    if len(rows) < 2:
        return None
    data = [each.data_us / 1e3 for each in rows]
    forward = [each.forward_us / 1e3 for each in rows]
    if forward_waits:
        late, least = max(data), min(forward)
        forward = [max(least, f - (late - d)) for f, d in zip(forward, data, strict=True)]
    busy = [d + f for d, f in zip(data, forward, strict=True)]
    worst = busy.index(max(busy))
    others_ms = _others(busy, worst)
    step_ms = statistics.median(each.step_us / 1e3 for each in rows)
    excess = busy[worst] - others_ms
    if others_ms <= 0 or busy[worst] < SLOW_FACTOR * others_ms or excess < SLOW_SHARE * step_ms:
        return None
    later = {
        name: v[worst] - _others(v, worst) for name, v in (("data", data), ("forward", forward))
    }
    where = max(later, key=later.__getitem__)
    return Slow(rows[worst].rank, busy[worst], others_ms, where, min(1.0, excess / step_ms))


def _others(values: Sequence[float], index: int) -> float:
    return statistics.median([*values[:index], *values[index + 1 :]])
