"""What a bench under torchrun found, as plain values; `ampwise.bench.scaling` fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampwise.document import Document
from ampwise.stats import Interval
from ampwise.telemetry.environment import Environment


@dataclass
class Scaled:
    """One precision on one number of processes.

    Attributes
    ----------
    parallel
        How the model is spread over them; empty for one process.
    reason
        Why it was not measured.
    step_ms
        Milliseconds of a whole step, of the slowest rank.
    samples_per_s
        The task's own samples (or tokens), of all processes.
    efficiency
        The rate over `processes` times the rate of one.
    apart
        What `efficiency` would be if nothing had to be communicated.
    communication
        Share of the step that is communication which backward does not hide.
    peak_memory_bytes
        Peak of live tensors over whole steps, of each rank.
    held_bytes
        What each rank holds between steps: parameters, their copies, buffers, optimizer state.
    """

    precision: str
    processes: int
    parallel: str = ""
    reason: str = ""
    rounds: int = 0
    step_ms: Interval | None = None
    samples_per_s: float | None = None
    efficiency: Interval | None = None
    apart: Interval | None = None
    communication: Interval | None = None
    peak_memory_bytes: list[int] = field(default_factory=list[int])
    held_bytes: list[int] = field(default_factory=list[int])


@dataclass
class ScalingReport(Document):
    """A scaling run.

    Attributes
    ----------
    threads
        Threads that each rank computes with.
    cores
        Processors that this machine lets a process use.
    samples_per_process
        Samples in a step of one process.
    left_out
        Precisions that were not tried, with the reason.
    """

    schema = "ampwise.scaling/1"

    task: str
    device: str
    environment: Environment
    task_info: dict[str, Any] = field(default_factory=dict[str, Any])
    unit: str = "samples"
    processes: int = 1
    threads: list[int] = field(default_factory=list[int])
    cores: int = 0
    samples_per_process: int = 0
    results: list[Scaled] = field(default_factory=list[Scaled])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    interrupted: bool = False
    failed: str = ""

    @property
    def ended(self) -> str:
        """What ended the run early: ``interrupted``, ``failed``, or nothing."""
        return "failed" if self.failed else "interrupted" if self.interrupted else ""

    @property
    def measured(self) -> bool:
        """Whether there is a figure in it."""
        return any(each.step_ms for each in self.results)
