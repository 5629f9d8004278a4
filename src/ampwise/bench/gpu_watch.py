"""What a GPU went through while a race ran on it: clocks, throttling, heat, power, company.

Samples are taken between turns, right after one of an arm, and counted for that arm. The driver
renews its figures every few tens of milliseconds at best, so samples are at least `PERIOD_S` apart,
and where turns are shorter than that a sample speaks for the turns before it, too. Turns come in
shuffled order, so this blurs the difference between arms, but points at no innocent one for long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ampwise.document import Finite
from ampwise.telemetry.nvml import REASONS, Gpu, Reading

PERIOD_S = 0.05
SHARE_MAX = 0.05
"""Share of an arm's samples that may be throttled, or shared with another process."""
CLOCK_MIN = 0.95


@dataclass(frozen=True)
class Spread:
    """Of samples: the lowest, the median and the highest."""

    low: Finite
    median: Finite
    high: Finite


@dataclass(frozen=True)
class GpuFigures:
    """What samples said; None where none of them could be read.

    Attributes
    ----------
    clock_mhz
        Of the multiprocessors.
    throttled
        Share of the samples in which something held the clock down, by what; also what is no
        trouble, such as ``idle``.
    shared
        Share of the samples with another compute process on the GPU.
    """

    samples: int
    clock_mhz: Spread | None = None
    throttled: dict[str, float] | None = None
    temperature_c: Spread | None = None
    power_w: Spread | None = None
    shared: float | None = None


@dataclass(frozen=True)
class GpuRecord:
    """A GPU during a race.

    Attributes
    ----------
    race
        Of all samples.
    arms
        Of the samples right after a turn of each arm.
    others
        Process ids of other compute processes that were seen.
    unread
        Figure, or ``gpu`` for all of them -> why it could not be read.
    """

    race: GpuFigures
    arms: dict[str, GpuFigures] = field(default_factory=dict[str, GpuFigures])
    others: list[int] = field(default_factory=list[int])
    unread: dict[str, str] = field(default_factory=dict[str, str])

    def complaints(self) -> list[str]:
        """What makes figures doubtful, and what to do; empty for a steady GPU of one's own."""
        said = (*self._throttling(), self._clocks(), self._company())
        return [each for each in said if each]

    def gaps(self) -> list[str]:
        """What could not be read, and why."""
        if "gpu" in self.unread:
            return [f"the GPU's clocks and throttling were not watched: {self.unread['gpu']}"]
        return [f"{name} of the GPU was not read: {why}" for name, why in self.unread.items()]

    def _throttling(self) -> list[str]:
        said: list[str] = []
        for reason in REASONS:
            shares = {
                name: each.throttled.get(reason.words, 0.0)
                for name, each in self.arms.items()
                if each.throttled is not None
            }
            hit = {name: share for name, share in shares.items() if share > SHARE_MAX}
            if reason.remedy and hit:
                worst_first = sorted(hit, key=hit.__getitem__, reverse=True)
                arms = ", ".join(f"{name} {hit[name]:.0%}" for name in worst_first)
                said.append(
                    f"the GPU's clock was held down ({reason.words}; share of the samples: "
                    f"{arms}): {reason.remedy}"
                )
        return said

    def _clocks(self) -> str:
        """Arms at unlike clocks; or, of all alike, a clock that was mostly below its top."""
        medians = {
            name: each.clock_mhz.median
            for name, each in self.arms.items()
            if each.clock_mhz is not None
        }
        whole = self.race.clock_mhz
        if whole is None or not medians:
            return ""
        slow, fast = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
        remedy = f"lock it to what it can hold (nvidia-smi -lgc {medians[slow]:.0f})"
        if medians[slow] < CLOCK_MIN * medians[fast]:
            return (
                f"the GPU's clock was {medians[slow]:.0f} MHz in {slow}, {medians[fast]:.0f} MHz "
                f"in {fast}: {remedy}"
            )
        if whole.median < CLOCK_MIN * whole.high:
            return (
                f"the GPU's clock moved between {whole.low:.0f} and {whole.high:.0f} MHz, median "
                f"{whole.median:.0f}: {remedy}"
            )
        return ""

    def _company(self) -> str:
        share = self.race.shared
        if share is None or share <= SHARE_MAX:
            return ""
        pids = ", ".join(map(str, self.others))
        return (
            f"other processes were on the GPU in {share:.0%} of the samples (process {pids}): "
            "stop them, or take another GPU"
        )


class GpuWatch:
    """Samples a GPU from its making to `read`."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = Gpu(device)
        self._samples: list[tuple[str, Reading]] = []
        self._next_s = 0.0

    def sample(self, arm: str) -> None:
        """Look at the GPU after a turn of `arm`, unless it was looked at just now."""
        now = time.monotonic()
        if self._gpu.readable and now >= self._next_s:
            self._samples.append((arm, self._gpu.read()))
            self._next_s = now + PERIOD_S

    def read(self) -> GpuRecord:
        """What was seen so far."""
        by_arm: dict[str, list[Reading]] = {}
        for arm, reading in self._samples:
            by_arm.setdefault(arm, []).append(reading)
        everything = [reading for _, reading in self._samples]
        return GpuRecord(
            _figures(everything),
            {arm: _figures(readings) for arm, readings in by_arm.items()},
            sorted({pid for each in everything for pid in each.others or ()}),
            dict(self._gpu.unread),
        )


def _figures(readings: Sequence[Reading]) -> GpuFigures:
    shared = [bool(each.others) for each in readings if each.others is not None]
    return GpuFigures(
        len(readings),
        _spread(each.clock_mhz for each in readings),
        _shares([each.throttled for each in readings if each.throttled is not None]),
        _spread(each.temperature_c for each in readings),
        _spread(each.power_w for each in readings),
        sum(shared) / len(shared) if shared else None,
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = [each for each in values if each is not None]
    return Spread(min(found), statistics.median(found), max(found)) if found else None


def _shares(seen: Sequence[tuple[str, ...]]) -> dict[str, float] | None:
    """Share of the samples with each reason."""
    if not seen:
        return None
    reasons = sorted({reason for each in seen for reason in each})
    return {reason: sum(reason in each for each in seen) / len(seen) for reason in reasons}
