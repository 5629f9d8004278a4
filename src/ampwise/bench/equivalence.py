"""Are two precisions equally good? Equivalence of paired results, decided seed by seed.

A difference that is not significant proves nothing: with few seeds nothing is. So the question is
turned round. Per arm, over paired seeds (same initial weights, data order and dropout), let d be
the arm's metric minus float32's, and m the margin. Two one-sided t tests (TOST; Schuirmann 1987)
take ``d <= -m`` and ``d >= m`` for granted, and call the arm equivalent if both are refuted;
an arm whose difference is refuted to lie inside the margin is different.

Errors are controlled over the whole procedure, at `ALPHA` = 5 % false "equivalent":

- over looks: seeds are added one at a time while an arm is undecided, and every look is a chance to
  err, so each uses ``ALPHA / looks`` (Bonferroni: valid however the looks depend on each other);
- over precisions: Holm's step-down adjustment of the p values at each look.

Differences that are all the same have no spread, and a t test would take any mean for certain. An
accuracy on 20 samples moves in steps of 0.05: differences of exactly 0 then say little about 0.01.
So the caller gives the least standard deviation that the metric's resolution leaves room for.

What that costs in seeds, simulated with normal differences around 0, margin 0.01, one arm, looks at
5 to 12 seeds: at a standard deviation of 0.002 to 0.004 the median run ends at the first look, at
0.006 with 7 seeds, and at 0.010 half of the runs are undecided after 12. With the true difference
at the margin itself 2 % are called equivalent, where 5 % are allowed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ampwise.bench import student

ALPHA = 0.05
FIRST_LOOK = 5
MAX_SEEDS = 12
POWER = 0.8  # of both one-sided tests together

Decision = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class Parity:
    """What paired differences of one arm say.

    Attributes
    ----------
    seeds
        Paired differences seen.
    difference
        Their mean: the arm minus float32, in the metric's own unit and sign.
    low, high
        95 % confidence interval of the mean (of this look alone).
    sd
        Standard deviation of the differences as seen; tests and interval may use a larger one.
    p_equivalent, p_different
        The larger p value of the two one-sided tests, and that of lying inside the margin;
        adjusted for looks and precisions, so that both are compared with `ALPHA`.
    decision
        What follows.
    """

    seeds: int
    difference: float
    low: float
    high: float
    sd: float
    p_equivalent: float
    p_different: float
    decision: Decision = "undecided"


def decide(
    differences: Mapping[str, Sequence[float]],
    margin: float,
    looks: int = 1,
    least_sd: Mapping[str, float] | None = None,
) -> dict[str, Parity]:
    """Judge every arm by its differences so far.

    Parameters
    ----------
    differences
        Per arm, one finite or non-finite number a seed; non-finite: the arm diverged there.
    margin
        Differences within ``(-margin, margin)`` do not matter.
    looks
        How often this is called in all, at most, as seeds are added.
    least_sd
        Per arm the least standard deviation to believe (see `least_sd_of`); default 0.
    """
    least = least_sd or {}
    raw = {
        name: _tests(values, margin, least.get(name, 0.0)) for name, values in differences.items()
    }
    same = holm({name: each.p_equivalent * looks for name, each in raw.items()})
    other = holm({name: each.p_different * looks for name, each in raw.items()})
    return {
        name: _decided(replace(each, p_equivalent=same[name], p_different=other[name]))
        for name, each in raw.items()
    }


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values (Holm 1979), at most 1."""
    adjusted, largest = dict[str, float](), 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def least_sd_of(resolution: float) -> float:
    """Standard deviation of a difference that a metric's resolution hides.

    Each of two values, rounded to steps of r, is off by a uniform error of sd ``r / sqrt(12)``.
    """
    return resolution / math.sqrt(6)


def _tests(values: Sequence[float], margin: float, least_sd: float) -> Parity:
    """Both tests on one arm, not adjusted."""
    seen = np.asarray(values, dtype=float)
    count = len(seen)
    if not np.isfinite(seen).all():
        return Parity(count, math.nan, math.nan, math.nan, math.nan, 1.0, 0.0)
    if count < 2:
        mean = float(seen.mean()) if count else math.nan
        return Parity(count, mean, -math.inf, math.inf, math.nan, 1.0, 1.0)
    mean, sd = float(seen.mean()), float(seen.std(ddof=1))
    error, freedom = max(sd, least_sd) / math.sqrt(count), count - 1
    reach = student.quantile(freedom, 0.975) * error
    inside = margin - abs(mean)  # how far the mean lies inside the margin; negative outside
    if error > 0:
        p_equivalent = student.cdf(freedom, -inside / error)
    else:  # the same difference with every seed, as of arms that agree bit for bit
        p_equivalent = 0.0 if inside > 0 else 1.0
    return Parity(count, mean, mean - reach, mean + reach, sd, p_equivalent, 1 - p_equivalent)


def _decided(parity: Parity) -> Parity:
    if parity.p_equivalent <= ALPHA:
        return replace(parity, decision="equivalent")
    if parity.p_different <= ALPHA:
        return replace(parity, decision="different")
    return parity


def seeds_needed(parity: Parity, margin: float, tests: int) -> int | None:
    """Seeds in all that would decide an undecided arm with 80 % probability.

    If mean and deviation stay as seen, that is; by the usual t approximation of the power. None
    where no number below 1,000 would.

    Parameters
    ----------
    tests
        Looks times precisions: what `ALPHA` is divided by.
    """
    distance = abs(margin - abs(parity.difference))
    if not (parity.sd > 0 and distance > 0):
        return None

    def enough(count: int) -> bool:
        wanted = (1 - ALPHA / tests, (1 + POWER) / 2)
        reached = distance / parity.sd * math.sqrt(count)
        return reached >= sum(student.quantile(count - 1, each) for each in wanted)

    counts = range(parity.seeds + 1, 1000)
    first = bisect.bisect_left(counts, True, key=enough)  # more seeds are never worse
    return counts[first] if first < len(counts) else None
