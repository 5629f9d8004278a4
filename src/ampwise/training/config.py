"""What a training run is asked to do, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ampwise.distributed.wrap import Parallel
from ampwise.document import Document
from ampwise.errors import UsageError
from ampwise.policy import Resolution
from ampwise.step import Activity

Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes
    ----------
    resolution
        Precision and device, and how they came about.
    steps, epochs
        When to end: whichever comes first; one of them is given.
    accumulate
        Micro-batches in an accumulation window.
    max_grad_norm
        Clip the gradient norm to this; None: no clipping.
    schedule
        Learning rate over the run: ``constant``, or ``cosine`` down to a tenth (needs `steps`).
    warmup_steps
        Steps over which the learning rate rises from zero.
    evaluate_every, checkpoint_every
        Steps between evaluations and checkpoints; None: at the end of each epoch.
    seed
        Of initialisation, dropout and data order.
    out
        The run's folder; None: a new numbered one.
    resume
        Continue the run in `out`.
    allow_changes
        Resume it also where it was set up otherwise, and go on with the settings of now.
    track
        Trackers to log to.
    strict
        Fail if the precision was not active.
    parallel
        How the model is spread over the processes that torchrun started: ``ddp`` or ``fsdp``.
    watch_every
        Steps between two comparisons of the ranks with each other; 0: none.
    rank_timeout_s
        Seconds after which a process that does not go on ends the run.
    on_fault
        Given the diagnosis of the first abnormal skipped step and the run's folder; stops training
        by raising.
    options
        Of the command, as the run's record keeps them for a resume.
    """

    resolution: Resolution
    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    seed: int = 0
    out: Path | None = None
    resume: bool = False
    allow_changes: bool = False
    track: tuple[str, ...] = ()
    strict: bool = False
    parallel: Parallel = "ddp"
    watch_every: int = 50
    rank_timeout_s: float = 600.0
    on_fault: Callable[[Any, Path], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise UsageError("train: expected steps or epochs, got neither")
        if self.schedule == "cosine" and self.steps is None:
            raise UsageError("schedule cosine needs --steps, to know where it ends")
        if self.resume and self.out is None:
            raise UsageError("resume: name the run's folder with --out")

    def to_json(self) -> dict[str, Any]:
        """What belongs in the run's record, as plain values."""
        return {
            "precision": self.resolution.policy.text,
            "device": self.resolution.device,
            "steps": self.steps,
            "epochs": self.epochs,
            "accumulate": self.accumulate,
            "max_grad_norm": self.max_grad_norm,
            "schedule": self.schedule,
            "warmup_steps": self.warmup_steps,
            "seed": self.seed,
        }


@dataclass
class TrainResult(Document):
    """How a run ended.

    Attributes
    ----------
    status
        ``running``, ``finished``, ``interrupted`` or ``failed: ...``.
    loss
        Loss of the last step, as the task reports it.
    metrics
        Held-out metrics of the last evaluation.
    data_wait_fraction
        Share of the time the device waited for data, 0 to 1.
    ranks, parallel
        How many processes trained, and how the model was spread over them; None for one.
    """

    schema = "ampwise.train/1"
    non_finite_words = True

    task: str
    precision: str
    folder: Path
    status: str = "running"
    steps: int = 0
    epochs: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped_steps: int = 0
    loss_scale: float = 1.0
    samples_per_s: float | None = None
    data_wait_fraction: float = 0.0
    host_syncs_per_step: int = 0
    activity: Activity | None = None
    resumed_from: int | None = None
    ranks: int = 1
    parallel: Parallel | None = None
    messages: list[str] = field(default_factory=list[str])
