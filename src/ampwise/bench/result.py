"""What a bench run found, as plain values; renderers and the JSON twin read these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Required, TypedDict

from ampwise.bench.contamination import Contamination
from ampwise.bench.levers import Levers
from ampwise.bench.parity import ParityReport
from ampwise.document import Document
from ampwise.products import OddProduct
from ampwise.stats import Interval
from ampwise.telemetry.environment import Environment

Status = Literal["pass", "fail", "not measured"]
ArmStatus = Literal["measured", "cut short", "failed", "not run"]


@dataclass(frozen=True)
class Requirement:
    """One requirement on one precision."""

    status: Status
    value: float | None
    threshold: float
    reason: str


class _Accuracy(TypedDict, total=False):
    metric: Required[str]
    difference: float
    equivalent: bool | None


@dataclass
class PrecisionResult:
    """Everything measured of one precision; None is what was not measured.

    Attributes
    ----------
    status, reason
        Whether it was measured, and if not, why.
    note
        What the device does in this format, where it gains nothing.
    emulated
        Why the speed of its steps says nothing about the format, where it does not.
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
        What matrix products of forward really ran in.
    exceptions
        Where, if not in the precision: products of forward and backward in another dtype, by line.
    """

    name: str
    status: ArmStatus = "measured"
    reason: str = ""
    note: str = ""
    emulated: str = ""
    matmul_speedup: float | None = None
    step_ms: Interval | None = None
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict[str, int])
    resident_bytes: int | None = None
    speedup: Interval | None = None
    memory_reduction: float | None = None
    accuracy: Annotated[dict[str, float | str | bool | None], _Accuracy] | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    loss_difference: float | None = None
    host_syncs_per_step: int | None = None
    skipped_steps: int | None = None
    matmul_dtypes: dict[str, int] = field(default_factory=dict[str, int])
    exceptions: list[OddProduct] = field(default_factory=list[OddProduct])
    requirements: dict[str, Requirement] = field(default_factory=dict[str, Requirement])

    @property
    def instead(self) -> str:
        """What stands where a figure of the race is missing."""
        return "not measured" if self.status == "measured" else self.status


@dataclass
class BenchReport(Document):
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

    schema = "ampwise.bench/1"

    task: str
    device: str
    environment: Environment
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

    def statuses(self) -> list[Status]:
        """Status of every requirement of every precision but the baseline."""
        return [
            requirement.status
            for precision in self.precisions
            for requirement in precision.requirements.values()
        ]
