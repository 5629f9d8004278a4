"""Paired ratios: what one arm costs relative to another, when both ran in the same rounds.

Machines drift (clocks, neighbours, page cache), and drift within a round hits all arms alike. So
the figure is the median over rounds of the ratio of two arms' times in the same round, taken in
logarithms so that 2x and 0.5x are equally far from 1, with a percentile bootstrap interval over
rounds. No sample is dropped: the median does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampwise.document import Finite

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: Finite
    low: Finite
    high: Finite

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def paired_speedup(baseline_ms: Sequence[float], arm_ms: Sequence[float]) -> Interval:
    """How many times faster the arm is; both in the order of the rounds, in any time unit."""
    logs = np.log(np.asarray(baseline_ms)) - np.log(np.asarray(arm_ms))
    return _exp(_bootstrap(logs))


def typical(values: Sequence[float]) -> Interval:
    """Median of positive values, and its interval."""
    return _exp(_bootstrap(np.log(np.asarray(values))))


def _bootstrap(values: np.ndarray) -> tuple[float, float, float]:
    draws = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def _exp(interval: tuple[float, float, float]) -> Interval:
    return Interval(*(float(np.exp(each)) for each in interval))
