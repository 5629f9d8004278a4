"""The requirements of mixed precision, each pass, fail or not measured, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ampwise.bench.result import PrecisionResult, Requirement
from ampwise.bench.stats import Interval
from ampwise.errors import UsageError


@dataclass(frozen=True)
class Thresholds:
    """What counts as enough.

    Attributes
    ----------
    speedup
        At least this many times faster than fp32.
    memory_reduction
        At least this share of fp32's peak memory saved, 0 to 1.
    accuracy_difference
        Held-out metric within this of fp32's.
    """

    speedup: float = 1.5
    memory_reduction: float = 0.40
    accuracy_difference: float = 0.01

    def __post_init__(self) -> None:
        if not self.speedup > 0:
            raise UsageError(f"min-speedup: expected a ratio above 0, got {self.speedup}")
        if not 0 <= self.memory_reduction < 1:
            raise UsageError(
                f"min-memory-reduction: expected a share from 0 to 1, got {self.memory_reduction}"
            )
        if not self.accuracy_difference > 0:
            raise UsageError(
                "max-accuracy-difference: expected a margin above 0, got "
                f"{self.accuracy_difference}"
            )


def judge(precision: PrecisionResult, thresholds: Thresholds) -> dict[str, Requirement]:
    """Every requirement on a precision that is not the baseline."""
    return {
        "speedup": _speedup(precision, thresholds.speedup),
        "memory_reduction": _memory(precision, thresholds.memory_reduction),
        "accuracy_difference": Requirement(
            "not measured",
            None,
            thresholds.accuracy_difference,
            "parity takes several paired seeds; not in this version",
        ),
    }


def _speedup(precision: PrecisionResult, threshold: float) -> Requirement:
    measured = precision.speedup
    if measured is None:
        return Requirement("not measured", None, threshold, _why_not(precision))
    if measured.low >= threshold:
        return Requirement("pass", measured.median, threshold, str(measured))
    if measured.high < threshold:
        return Requirement("fail", measured.median, threshold, str(measured))
    return Requirement("not measured", measured.median, threshold, _undecided(measured, threshold))


def _undecided(measured: Interval, threshold: float) -> str:
    what_to_do = "run longer (--steps), or on a quieter machine"
    return f"undecided: {measured} includes {threshold:g}; {what_to_do}"


def _memory(precision: PrecisionResult, threshold: float) -> Requirement:
    saved = precision.memory_reduction
    if saved is None:
        return Requirement("not measured", None, threshold, _why_not(precision))
    # The peak is deterministic: there is no interval to be undecided in.
    status = "pass" if saved >= threshold else "fail"
    return Requirement(status, saved, threshold, f"{saved:.0%} of fp32's peak saved")


def _why_not(precision: PrecisionResult) -> str:
    return precision.reason or "the run ended before it was measured"
