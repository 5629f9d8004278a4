"""The requirements of mixed precision, each pass, fail or not measured, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampwise.bench.parity import ParityReport
from ampwise.bench.race import TIME_IS_UP
from ampwise.bench.result import PrecisionResult, Requirement
from ampwise.errors import UsageError
from ampwise.stats import Interval

NOT_ASKED = "not asked for (--seeds 0)"
NOISY = 1.05
"""How far apart two equal arms may seem to lie before the machine is called noisy."""


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


def judge(
    precision: PrecisionResult,
    thresholds: Thresholds,
    parity: ParityReport | None,
    noise: Interval | None = None,
    ended: str = "",
    *,
    disturbed: bool = False,
) -> dict[str, Requirement]:
    """Every requirement on a precision that is not the baseline.

    Parameters
    ----------
    ended
        What ended the run before everything was measured: ``interrupted``, ``failed``, or nothing.
    disturbed
        Whether the report's notes say what disturbed the race, and what to do about it.
    """
    return {
        "speedup": _speedup(precision, thresholds.speedup, noise, ended, disturbed),
        "memory_reduction": _memory(precision, thresholds.memory_reduction, ended),
        "accuracy_difference": _accuracy(precision, thresholds.accuracy_difference, parity, ended),
    }


def _speedup(
    precision: PrecisionResult,
    threshold: float,
    noise: Interval | None,
    ended: str,
    disturbed: bool,
) -> Requirement:
    """Decided where the whole interval, widened by the noise floor, lies on one side."""
    measured = precision.speedup
    if precision.emulated:
        return Requirement("not measured", None, threshold, precision.emulated)
    if measured is None:
        return Requirement("not measured", None, threshold, _why_not(precision, ended))
    floor = 1.0 if noise is None else max(noise.median, 1 / noise.median)
    if measured.low / floor >= threshold:
        return Requirement("pass", measured.median, threshold, str(measured))
    if measured.high * floor < threshold:
        return Requirement("fail", measured.median, threshold, str(measured))
    why = _undecided(measured, threshold, disturbed)
    if noise is not None and floor > NOISY:
        why = f"too noisy: fp32 against itself reads {noise}; {why}"
    return Requirement("not measured", measured.median, threshold, why)


def _undecided(measured: Interval, threshold: float, disturbed: bool) -> str:
    what_to_do = (
        "the notes say what disturbed the race, and what to do"
        if disturbed
        else "run longer (--steps), or on a quieter machine"
    )
    return f"undecided: {measured} includes {threshold:g}; {what_to_do}"


def _memory(precision: PrecisionResult, threshold: float, ended: str) -> Requirement:
    saved = precision.memory_reduction
    if saved is None:
        return Requirement("not measured", None, threshold, _why_not(precision, ended))
    # The peak is deterministic: there is no interval to be undecided in.
    status = "pass" if saved >= threshold else "fail"
    return Requirement(status, saved, threshold, f"{saved:.0%} of fp32's peak saved")


def _accuracy(
    precision: PrecisionResult, threshold: float, parity: ParityReport | None, ended: str
) -> Requirement:
    def unmeasured(reason: str) -> Requirement:
        return Requirement("not measured", None, threshold, reason)

    if parity is None:
        return unmeasured(_why_not(precision, ended) if ended else NOT_ASKED)
    if precision.name in parity.left_out:
        return unmeasured(parity.left_out[precision.name])
    if precision.name not in parity.arms:
        return unmeasured(
            f"{TIME_IS_UP}; no seed was trained"
            if parity.out_of_time
            else _why_not(precision, ended)
        )
    if not parity.learning:
        return unmeasured(parity.why_not)
    if precision.name in parity.errors:
        return Requirement("fail", None, threshold, parity.errors[precision.name])
    return _compared(precision.name, threshold, parity)


def _compared(name: str, threshold: float, parity: ParityReport) -> Requirement:
    """By the paired differences of an arm that trained to the end."""
    found, said = parity.arms[name], parity.said(name)
    if loss := parity.loss_says(name):
        said += f"; but {loss}"
    if parity.too_coarse(name):
        why = f"{parity.metric} is too coarse to tell: all {found.seeds} differences are exactly 0"
        said = f"undecided: {why}{_steps(parity)}; evaluate on more held-out data"
        return Requirement("not measured", None, threshold, said)
    if found.decision == "equivalent":
        return Requirement("pass", found.difference, threshold, said)
    if found.decision == "undecided":
        needed = parity.needed.get(name)
        more = f"; about {needed} seeds would decide (--seeds {needed})" if needed else ""
        if parity.out_of_time:
            more = f"; {TIME_IS_UP}"
        return Requirement("not measured", found.difference, threshold, f"undecided: {said}{more}")
    if parity.worse(name):
        return Requirement("fail", found.difference, threshold, said)
    return Requirement("pass", found.difference, threshold, f"better than fp32: {said}")


def _steps(parity: ParityReport) -> str:
    return f", in steps of {parity.resolution:.2g}" if math.isfinite(parity.resolution) else ""


def _why_not(precision: PrecisionResult, ended: str) -> str:
    return precision.reason or f"{ended or 'the run ended'} before it was measured"
