"""``ampwise train``: train a task with a precision policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ampwise.cli.options import Common, positive
from ampwise.errors import EXIT_INTERRUPTED, EXIT_OK, RunError, UsageError
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.distributed.launch import Launch
    from ampwise.numerics.result import Diagnosis
    from ampwise.policy import Resolution
    from ampwise.training.config import TrainConfig

DEFAULT_EPOCHS = 1

OF_ONE_CALL = ("out", "config", "resume", "allow_changes", "json", "quiet", "debug")
"""Options that a run does not remember: where it is, what is shown, and leave given once."""

_END = ("steps", "epochs")
"""Options that say together when a run ends."""


@dataclass
class Options(Common):
    """Train a task: checkpoints, resume, live progress, trackers."""

    precision: str = "auto"
    """fp32, tf32, fp16, bf16, bf16-master, bf16-pure, fp8, a policy such as bf16:islands=head, or
    auto: what the first step is fastest in."""

    allow_emulated: bool = False
    """Keep a precision that this device only emulates, instead of falling back to fp32."""

    levers: str = ""
    """Comma-separated: compile, fused-optimizer, channels-last, unfused-attention, checkpointing,
    batch=N, and the task's own, such as chunked-loss; ampwise tune --objective speed finds which.
    """

    strict: bool = False
    """Fail instead of falling back, and fail if the precision was not active."""

    steps: int | None = None
    """Optimizer steps to make in all."""

    epochs: int | None = None
    """Epochs to make in all; default 1 if --steps is not given."""

    accumulate: int = 1
    """Micro-batches in an accumulation window."""

    max_grad_norm: float | None = None
    """Clip the gradient norm to this."""

    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate over the run; cosine needs --steps."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""

    evaluate_every: int | None = None
    """Steps between evaluations; default: at the end of each epoch."""

    checkpoint_every: int | None = None
    """Steps between checkpoints; default: at the end of each epoch."""

    resume: bool = False
    """Continue the run in --out from its last checkpoint, with its own options where they are not
    given anew; --steps or --epochs replaces both."""

    allow_changes: bool = False
    """With --resume: go on with another batch size, learning rate, optimizer or schedule than the
    checkpoint's, each of which is named; without it they are refused."""

    on_fault: Literal["off", "diagnose", "stop"] = "off"
    """At the first step skipped for more than its loss scale: write diagnosis.json and
    diagnosis.html into the run's folder and go on, or stop there (exit code 3)."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a copy of the model in each process, or a share of it (FSDP2)."""

    rank_timeout: float = 600.0
    """Seconds after which a process that hangs ends the run, and is named; the longest step must
    fit in, the first one included."""

    watch_every: int = 50
    """Steps after which the processes compare loss scale, step count and parameters; 0: never."""

    track: str | None = None
    """Comma-separated trackers: wandb, tensorboard, mlflow, csv."""

    def earlier(self) -> Mapping[str, Any]:
        """What the run that goes on was asked for.

        Raises
        ------
        UsageError
            When there is no run in ``--out``, or its record is damaged.
        """
        if not self.resume or self.out is None:
            return {}
        from ampwise.distributed.launch import launch
        from ampwise.telemetry.run import RunFolder

        record = self.out / "run.json"
        if launch().may_restart and not record.exists():
            return {}  # such a run begins where there is none
        asked = RunFolder.resume(self.out, say).read().get("options", {})
        if not isinstance(asked, dict) or not set(asked) <= set(_remembered()):
            raise UsageError(
                f"{record} is damaged: expected options of ampwise train under options, got "
                f"{str(asked)[:80]}"  # pyright: ignore[reportUnknownArgumentType]
            )
        ends_anew = self.steps is not None or self.epochs is not None
        return {name: each for name, each in asked.items() if not (ends_anew and name in _END)}  # pyright: ignore[reportUnknownVariableType]

    def to_remember(self, resolution: Resolution) -> dict[str, Any]:
        """What a resume needs to know, as plain values; the precision as what it became."""
        values = {name: getattr(self, name) for name in _remembered()}
        became = "auto" if resolution.guess else resolution.policy.text  # until its first step
        values |= {"precision": became, "set": self.settings()}
        return {name: each for name, each in values.items() if each is not None}


def _remembered() -> list[str]:
    return [field.name for field in fields(Options) if field.name not in OF_ONE_CALL]


def run(options: Options) -> int:
    """Train, print how it went; the exit code."""
    for name in ("steps", "epochs", "accumulate", "max_grad_norm"):
        positive(name.replace("_", "-"), getattr(options, name))
    positive("rank-timeout", options.rank_timeout)
    for name in ("evaluate_every", "checkpoint_every"):
        positive(name.replace("_", "-"), getattr(options, name))

    from ampwise.capability import present_devices
    from ampwise.cli.progress import train_progress
    from ampwise.distributed.launch import joined, launch
    from ampwise.policy.resolution import choose_device
    from ampwise.report.train import render
    from ampwise.tasks import load_task
    from ampwise.tasks.levers import pulled
    from ampwise.telemetry.run import plain
    from ampwise.training.loop import train
    from ampwise_lint.base.console import Console

    me = launch()
    if me.size == 1 and options.parallel != "ddp" and not options.resume:
        raise UsageError(
            f"--parallel {options.parallel} is for several processes; start them with "
            "torchrun --nproc-per-node 2 -m ampwise train ..."
        )
    if me.may_restart and options.out is None:
        raise UsageError(
            "torchrun may start processes anew (--max-restarts), and they must find the run: name "
            "its folder with --out"
        )
    kind, _, _ = choose_device(options.device, present_devices())
    with joined(me, kind, options.rank_timeout) as store:
        with train_progress(quiet=options.quiet, mute=not me.leads) as shown:
            resolution = _resolved(options, me)
            config = _config(options, resolution)
            task = pulled(load_task(options.task, options.settings()), options.levers.split(","))
            announce = shown.warning if resolution.changed else shown.message
            announce(f"precision: {resolution}")
            if me.size > 1:
                shown.message(f"{me.size} processes, {options.parallel}")
            result = train(task, config, shown, me, store)
        if me.leads:
            _write_page(result.folder)
            if options.json != "-":
                render(result, Console())
            write_json(json.dumps(plain(result.to_json()), indent=2, allow_nan=False), options.json)
    if result.status != "interrupted":
        return EXIT_OK
    if me.leads:
        tell(f"to go on: {_resuming(result.folder, me)}", err=True)
    return EXIT_INTERRUPTED


def _resuming(folder: Path, me: Launch) -> str:
    """The command that continues the run in a folder."""
    from ampwise.cli.invocation import again

    out = [f"--out={folder}"] if str(folder).startswith("-") else ["--out", str(folder)]
    return again(me, ["train", "--resume", *out])


def _resolved(options: Options, me: Launch) -> Resolution:
    """What the precision becomes, by the first process's measurement: the same for all."""
    from ampwise.distributed.host_group import everyone
    from ampwise.distributed.launch import device_of
    from ampwise.policy import resolve

    found = everyone().first(
        lambda: resolve(
            options.precision,
            options.device,
            strict=options.strict,
            allow_emulated=options.allow_emulated,
        )
    )
    return replace(found, device=device_of(me, found.device))


def _config(options: Options, resolution: Resolution) -> TrainConfig:
    from ampwise.training.config import TrainConfig

    epochs = options.epochs
    if epochs is None and options.steps is None:
        epochs = DEFAULT_EPOCHS
    return TrainConfig(
        resolution=resolution,
        steps=options.steps,
        epochs=epochs,
        accumulate=options.accumulate,
        max_grad_norm=options.max_grad_norm,
        schedule=options.schedule,
        warmup_steps=options.warmup_steps,
        evaluate_every=options.evaluate_every,
        checkpoint_every=options.checkpoint_every,
        seed=options.seed,
        out=options.out,
        resume=options.resume,
        allow_changes=options.allow_changes,
        track=tuple(each for each in (options.track or "").split(",") if each),
        strict=options.strict,
        parallel=options.parallel,
        watch_every=options.watch_every,
        rank_timeout_s=options.rank_timeout,
        on_fault=None if options.on_fault == "off" else _diagnosed(options.on_fault == "stop"),
        options=options.to_remember(resolution),
    )


def _diagnosed(stop: bool) -> Callable[[Diagnosis, Path], None]:
    """What is done with the diagnosis of a skipped step."""

    def write(found: Diagnosis, folder: Path) -> None:
        from ampwise.report.diagnosis import headline, to_html
        from ampwise_lint.base.files import atomic_write_text

        text = json.dumps(found.to_json(), indent=2, allow_nan=False)
        atomic_write_text(folder / "diagnosis.json", text + "\n")
        atomic_write_text(folder / "diagnosis.html", to_html(found))
        if stop:
            raise RunError(f"{headline(found)}; {folder / 'diagnosis.html'} says more")

    return write


def _write_page(folder: Path) -> None:
    """Write ``report.html``; a disk that is full by now is said, and no reason to fail."""
    from ampwise.report.train import TrainedRun, to_html
    from ampwise_lint.base.files import atomic_write_text

    try:
        atomic_write_text(folder / "report.html", to_html(TrainedRun.load(folder)))
    except OSError as error:
        say(f"report.html: {error.strerror}")
