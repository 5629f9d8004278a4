"""What a bench run found, as plain values; renderers and the JSON twin read these."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ampwise.bench.contamination import Contamination
from ampwise.bench.levers import Levers
from ampwise.bench.parity import ParityReport
from ampwise.bench.stats import Interval
from ampwise.errors import UsageError

SCHEMA = "ampwise.bench/1"

Status = Literal["pass", "fail", "not measured"]
ArmStatus = Literal["measured", "cut short", "failed", "not run"]


@dataclass(frozen=True)
class Requirement:
    """One requirement on one precision."""

    status: Status
    value: float | None
    threshold: float
    reason: str


@dataclass
class PrecisionResult:
    """Everything measured of one precision; None is what was not measured.

    Attributes
    ----------
    status, reason
        Whether it was measured, and if not, why.
    note
        What the device does in this format, where it gains nothing.
    matmul_speedup
        How many times faster than float32 plain products are in this format, by the probe.
    step_ms
        Milliseconds of a whole step.
    samples_per_s
        The task's own samples (or tokens).
    peak_memory_bytes
        Peak of live tensors over whole steps.
    memory
        Bytes of each part at that peak.
    resident_bytes
        Growth of resident memory in a process of its own that builds the model and makes one step
        (CPU only): it includes what the C allocator keeps.
    speedup
        How many times faster than fp32, paired.
    memory_reduction
        Share of fp32's peak that is saved; negative when it takes more.
    accuracy
        Parity of the task's metric with fp32's over paired seeds: ``metric``, its ``mean``,
        ``difference`` with 95 % interval ``low`` to ``high``, ``equivalent`` (true, false, or None
        where undecided), ``p`` after correction, ``seeds``.
    loss_before, loss_after
        Held-out loss before the first and after the last step of the race.
    loss_difference
        Mean paired difference of the held-out loss from fp32's, relative; without parity, of the
        race's `loss_after`.
    matmul_dtypes
        What matrix products really ran in.
    """

    name: str
    status: ArmStatus = "measured"
    reason: str = ""
    note: str = ""
    matmul_speedup: float | None = None
    step_ms: Interval | None = None
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict[str, int])
    resident_bytes: int | None = None
    speedup: Interval | None = None
    memory_reduction: float | None = None
    accuracy: dict[str, float | str | bool | None] | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    loss_difference: float | None = None
    host_syncs_per_step: int | None = None
    skipped_steps: int | None = None
    matmul_dtypes: dict[str, int] = field(default_factory=dict[str, int])
    requirements: dict[str, Requirement] = field(default_factory=dict[str, Requirement])


@dataclass
class BenchReport:
    """A bench run.

    Attributes
    ----------
    rounds
        Rounds in which every arm made one step.
    left_out
        Precisions that were not tried, with the reason.
    loading_ms
        Milliseconds that a batch took to come from the task; not part of a step's time.
    verdict
        What to do, in sentences; the first is the decision.
    notes
        What a reader should know about the figures.
    noise
        Speed of a second fp32 arm over the first: 1, on a machine without noise.
    contamination
        What others took of the machine during the race.
    parity
        How precisions were compared over paired seeds, with loss curves; None when not asked for.
    levers
        What else helps, beside precision; None when not asked for.
    interrupted
        Whether the run was stopped before its end.
    failed
        What was raised, in one line, if that ended the run.
    """

    task: str
    device: str
    environment: dict[str, Any]
    task_info: dict[str, Any] = field(default_factory=dict[str, Any])
    unit: str = "samples"
    rounds: int = 0
    loading_ms: float | None = None
    precisions: list[PrecisionResult] = field(default_factory=list[PrecisionResult])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    verdict: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    noise: Interval | None = None
    contamination: Contamination | None = None
    parity: ParityReport | None = None
    levers: Levers | None = None
    interrupted: bool = False
    failed: str = ""

    @property
    def ended(self) -> str:
        """What ended the run early: ``interrupted``, ``failed``, or nothing."""
        return "failed" if self.failed else "interrupted" if self.interrupted else ""

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, schema ``ampwise.bench/1``; NaN and inf become null."""
        return {"schema": SCHEMA, **finite(asdict(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchReport:
        """The report that `to_json` wrote.

        Raises
        ------
        UsageError
            When `data` is something else, or of another version.
        """
        if data.get("schema") != SCHEMA:
            raise UsageError(f"expected a report of schema {SCHEMA}, got {data.get('schema')!r}")
        try:
            return revived(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"the report is damaged: {type(error).__name__}: {error}") from None

    def statuses(self) -> list[Status]:
        """Status of every requirement of every precision but the baseline."""
        return [
            requirement.status
            for precision in self.precisions
            for requirement in precision.requirements.values()
        ]


def revived(hint: Any, value: Any) -> Any:
    """A value of plain JSON as what its annotation says."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
    if hint is float and value is None:
        return math.nan  # JSON has no NaN, nor inf
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        made: Any = hint
        return made(**{name: revived(hints[name], value[name]) for name in hints if name in value})
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return {key: revived(inner[1], each) for key, each in value.items()}
    if origin is list:
        return [revived(inner[0], each) for each in value]
    return value


def finite(value: Any) -> Any:
    """The value as plain JSON: NaN and inf become null."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
