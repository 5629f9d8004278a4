"""The training loop around a `TrainStep`: data, evaluation, checkpoints, resume, records.

A run can end at any step and go on from its last checkpoint bit for bit. For that, a checkpoint is
taken between steps only, and remembers where the run is in its data (`epochs`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import Store
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ampwise.data import Feed
from ampwise.distributed.host_group import everyone
from ampwise.distributed.launch import Launch, is_lost
from ampwise.distributed.watchdog import NoWatchdog, watched
from ampwise.distributed.wrap import spread
from ampwise.errors import UsageError, in_one_line, is_out_of_memory
from ampwise.policy import Policy
from ampwise.step import StepRecord, TrainStep
from ampwise.step.precision import by_reason
from ampwise.step.together import as_one_optimizer
from ampwise.tasks import Task
from ampwise.tasks.checks import (
    build,
    first_batch,
    samples_in,
)
from ampwise.tasks.evaluation import held_out
from ampwise.tasks.iteration import Iteration
from ampwise.tasks.seeding import seed_all
from ampwise.telemetry import names
from ampwise.telemetry.environment import environment
from ampwise.telemetry.run import RunFolder
from ampwise.trackers import TrackerSet, check_names
from ampwise.training import checkpoint
from ampwise.training.changes import carried_over, differences, makeup, refusal
from ampwise.training.checkpoint import Trained
from ampwise.training.config import TrainConfig, TrainResult
from ampwise.training.epochs import Epochs
from ampwise.training.memory import peak_bytes
from ampwise.training.signals import StopSignals

_RATE_MEMORY = 0.9
"""Weight of the past in the running rate."""


class Progress(Protocol):
    """Who wants to know how far a run is."""

    def step(self, record: StepRecord, samples_per_s: float, planned: int | None) -> None:
        """A step is known."""

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation is known."""

    def message(self, text: str) -> None:
        """Something the user may want to know."""

    def warning(self, text: str) -> None:
        """Something the user must read."""


def train(
    task: Task,
    config: TrainConfig,
    progress: Progress,
    me: Launch | None = None,
    store: Store | None = None,
) -> TrainResult:
    """Train a task as configured; with several processes, all of them call this.

    `me` and `store`, where they met, are what `ampwise.distributed.launch` gives.

    Returns with status ``interrupted`` when SIGINT or SIGTERM asked it to stop, everything saved.

    Raises
    ------
    UsageError
        Before anything is trained, when the request cannot be carried out.
    RunError
        When training fails; the run's folder holds what there was.
    """
    check_names(config.track)
    seed_all(config.seed)  # the first batch of a seed is always the same
    batch_size = samples_in(task, first_batch(task))
    run = _Run(task, config, progress, me or Launch(), batch_size)
    try:
        limit_s = config.rank_timeout_s
        with StopSignals() as stop, watched(store, run.me, limit_s, run.last_words) as run.dog:
            run.train(stop)
    except BaseException as error:
        damage = run.damage_behind(error)
        run.result.status = f"failed: {in_one_line(damage or error)}"
        if damage is not None:
            raise damage from error
        raise
    finally:
        run.close()
    return run.result


@dataclass
class _Rate:
    """Running rate of samples, by the host's clock."""

    per_s: float = 0.0
    samples: int = 0
    since: float = 0.0

    def add(self, samples: int) -> None:
        self.samples += samples

    def step(self) -> None:
        """A step is complete: take its samples into the rate."""
        now = time.perf_counter()
        if self.since:
            current = self.samples / max(now - self.since, 1e-9)
            past = _RATE_MEMORY if self.per_s else 0.0
            self.per_s = past * self.per_s + (1 - past) * current
        self.samples, self.since = 0, now


class _Run:
    """One run and everything it holds open."""

    def __init__(
        self, task: Task, config: TrainConfig, progress: Progress, me: Launch, batch_size: int
    ) -> None:
        self.task, self.config, self.progress, self.me = task, config, progress, me
        policy = config.resolution.policy
        self.device = torch.device(config.resolution.device)
        on_ranks = None if me.size == 1 else lambda model: spread(model, config.parallel, policy)
        model, optimizers = build(task, self.device, config.seed, on_ranks)
        optimizer = as_one_optimizer(optimizers)
        self.iteration = Iteration(task, config.accumulate)
        self.makeup = makeup(task, config, optimizer, batch_size)
        makes_updates = self.iteration.makes_updates
        self.epochs = Epochs(task, me, whole=makes_updates, say=self.say)
        _part_ways(config.seed, me.rank)
        scheduler = _scheduler(optimizer, config)
        step = TrainStep(
            model,
            optimizers,
            policy=config.resolution,
            accumulate=config.accumulate,
            max_grad_norm=config.max_grad_norm,
            scheduler=scheduler,
            samples=task.samples,
            strict=config.strict,
            watch_every=config.watch_every,
            undo="window",  # an error ends the run
            on_fault=None if config.on_fault is None else self._on_fault,
        )
        self.trained = Trained(step.whole, optimizer, step, scheduler)
        self.rate = _Rate()
        self._waits_s = self._total_s = 0.0
        self._saved_at = -1
        self._resumed: Path | None = None
        self._saving: checkpoint.Saving | None = None
        self.dog = NoWatchdog()
        self._resolution, self._options = config.resolution, dict(config.options)
        kind = "auto" if config.resolution.guess else policy.name
        self.folder, resumes = self._open_folder(f"{task.name or 'task'}-{kind}")
        self.result = TrainResult(task.name or "task", policy.text, self.folder.path)
        if me.size > 1:
            self.result.ranks, self.result.parallel = me.size, config.parallel
        if resumes:
            self._resume()
        if step.left_out:
            self.say(f"{policy.text}: not in float8: {by_reason(step.left_out)}")
        self._describe()
        self.trackers = TrackerSet(
            config.track if me.leads else (),
            self.folder.path,
            self.folder.path.name,
            {"task": task.name, **config.to_json()},
            self.warn,
        )

    def _open_folder(self, name: str) -> tuple[RunFolder, bool]:
        """The run's folder, and whether to resume; the first process decides, the others look on.

        Where torchrun restarts processes, nobody says ``--resume``: a run that is there goes on.
        """
        opened: list[RunFolder] = []

        def open_it() -> tuple[str, bool]:
            out, again = self.config.out, self.me.may_restart
            there = out is not None and (out / "run.json").exists()
            resumes = there if again else self.config.resume
            if resumes:
                assert out is not None
                opened.append(RunFolder.resume(out, self.warn))
            else:
                opened.append(RunFolder.create(out, name, self.warn, trains=True))
            return str(opened[0].path), resumes

        path, resumes = everyone().first(open_it)
        return opened[0] if opened else RunFolder.observe(Path(path)), resumes

    def say(self, text: str) -> None:
        """Tell the user, and keep it in the record."""
        self._keep(text)
        self.progress.message(text)

    def warn(self, text: str) -> None:
        """Tell the user what has gone wrong, and keep it in the record."""
        self._keep(text)
        self.progress.warning(text)

    def _keep(self, text: str) -> None:
        if hasattr(self, "result"):
            self.result.messages.append(text)

    def _on_fault(self, diagnosis: Any) -> None:
        assert self.config.on_fault is not None
        self.warn(f"step {diagnosis.step} was skipped: {diagnosis.cause}; {diagnosis.explanation}")
        self.config.on_fault(diagnosis, self.folder.path)

    def damage_behind(self, error: BaseException) -> UsageError | None:
        """The error of a checkpoint whose state no step can be made from, if that is what it is.

        Nothing but the optimizer knows what belongs into its state.
        """
        first = self.trained.step.steps == self.result.resumed_from
        if self._resumed is None or not first or is_lost(error) or is_out_of_memory(error):
            return None
        return checkpoint.unusable(self._resumed, error)

    # -- the loop ----------------------------------------------------------------------------------

    def last_words(self, verdict: str) -> None:
        """Write down what ends the run."""
        self.result.status = f"failed: {verdict}"
        self.result.steps = self.trained.step.steps
        self._describe()

    def _beat(self, doing: str) -> None:
        self.dog.beat(self.trained.step.steps + 1, doing)

    def train(self, stop: StopSignals) -> None:
        """Epochs until the end, or until a signal asks to stop."""
        while not self._complete() and not self._stopping(stop):
            self._epoch(stop)
        if self.trained.step.stopping:
            self._save()
            self._finish_saving()
            self.result.status = "interrupted"
            return
        self._save()  # before the last evaluation, which may draw random numbers
        self._evaluate()
        self._finish_saving()
        self.result.status = "finished"

    def _epoch(self, stop: StopSignals) -> None:
        step = self.trained.step
        feed = Feed(self.epochs.rest(), self.device)
        self._beat("data")
        for turn in feed:
            self._beat("step")
            if turn.counts:
                samples = samples_in(self.task, turn.batch)
                self.epochs.used(samples)
                self.rate.add(samples * self.me.size)
            self.iteration(step, turn.batch, counts=turn.counts, last=turn.last)
            if step.resolution is not self._resolution:
                self._decided()
            self.epochs.passed()
            if step.boundary:
                self._after_step()
                if self._complete() or self._stopping(stop):
                    break
            self._beat("data")
        else:
            step.flush()
            self._end_epoch()
        self._waits_s += feed.wait_s
        self._total_s += feed.total_s

    def _decided(self) -> None:
        """`auto` has become a precision: say so, and remember it."""
        resolution = self.trained.step.resolution
        assert resolution is not None
        self._resolution = resolution
        self.result.precision = self.makeup["precision"] = resolution.policy.text
        if self._options:
            self._options["precision"] = resolution.policy.text
        self.say(f"precision: {resolution}")
        self._describe()

    def _stopping(self, stop: StopSignals) -> bool:
        """Whether to stop: a signal to any process stops all, at the same step."""
        step = self.trained.step
        if stop.requested or (self._saving is not None and self._saving.failed):
            step.ask_to_stop()
        return step.stopping

    def _end_epoch(self) -> None:
        self.epochs.end()
        self._after_step(epoch_end=True)

    def _after_step(self, *, epoch_end: bool = False) -> None:
        """Records, evaluation and checkpoint, where they are due."""
        config, steps = self.config, self.trained.step.steps
        self.rate.step()
        self._record(self.trained.step.poll())
        if self._complete():
            return
        if _due(config.evaluate_every, steps, epoch_end):
            self._evaluate()
        if _due(config.checkpoint_every, steps, epoch_end):
            self._save()

    def _complete(self) -> bool:
        steps, epochs = self.config.steps, self.config.epochs
        by_steps = steps is not None and self.trained.step.steps >= steps
        return by_steps or (epochs is not None and self.epochs.position.epoch >= epochs)

    # -- what it leaves ----------------------------------------------------------------------------

    def _record(self, records: list[StepRecord]) -> None:
        """Write steps as they become known to the folder, the trackers and the user."""
        for record in records if self.me.leads else ():
            metrics = names.metrics_of(
                record,
                self.result.precision,
                enabled=self._resolution.policy.autocast,
                samples_per_s=self.rate.per_s or None,
                peak_bytes=peak_bytes(self.device),
            )
            self.folder.append({"step": record.step, **metrics})
            self.trackers.log(metrics, record.step)
            self.progress.step(record, self.rate.per_s, self.config.steps)
            self.result.loss = record.loss
            self.result.skipped_steps = record.skipped_total

    def _evaluate(self) -> None:
        step = self.trained.step
        with self.dog.paused():
            metrics = held_out(self.task, step)
        if not metrics:
            return
        self._record(step.drain())
        self.result.metrics = metrics
        named = {names.eval_name(name): value for name, value in metrics.items()}
        self.folder.append({"step": step.steps, **named})
        self.trackers.log(named, step.steps)
        if self.me.leads:
            self.progress.evaluated(step.steps, metrics)
        self.rate.since = 0.0  # the next step's time would hold the evaluation

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this very step."""
        steps = self.trained.step.steps
        if steps == self._saved_at:
            return
        self._record(self.trained.step.drain())
        self.folder.flush()
        self._finish_saving()
        with self.dog.paused():
            self.epochs.count_samples()
            self._saving = checkpoint.save(
                *(self.folder.checkpoints, self.trained, self.epochs.position, self.makeup),
                wait=self.me.size == 1,
            )
        self._saved_at = steps
        self.rate.since = 0.0

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is still being written; its error is that of all ranks."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self.dog.paused():
                saving.wait()

    def _resume(self) -> None:
        path = everyone().first(lambda: checkpoint.newest(self.folder.checkpoints))
        if path is None and self.me.may_restart:
            self.folder.continue_after(0)
            self.say("started anew after a process died; there was no checkpoint yet")
            return
        if path is None:
            raise UsageError(f"nothing to resume in {self.folder.path}: it has no checkpoint yet")
        content = checkpoint.load(path, self.trained, self.warn)
        with checkpoint.sound(path):
            content = self._accepted(content, path)
            self.epochs.resume(checkpoint.restore(content, self.trained), content["rng"])
        if self.trained.step.resolution is not self._resolution:
            self._decided()
        steps = self.trained.step.steps
        self._saved_at = self.result.resumed_from = steps
        self._resumed = path
        self.folder.continue_after(steps)
        self.say(f"resumed at step {steps} from {path}")

    def _accepted(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        """What a checkpoint holds, as this run goes on from it.

        Raises
        ------
        UsageError
            For another task, and for any difference that is not allowed.
        """
        before, now, position = content["config"], self.makeup, content["position"]
        if before["task"] != now["task"]:
            raise UsageError(
                f"{self.folder.path} is a run of task {before['task']!r}, not {now['task']!r}"
            )
        if self._resolution.guess:
            now["precision"] = before["precision"]  # which the step takes over
        if before["precision"] != now["precision"]:
            self.say(_converted(before["precision"], now["precision"]))
        position.setdefault("samples", position["batch"] * now["batch_size"])  # an older one
        lines = everyone().first(lambda: differences(before, now))
        now["changes"] = [*before.get("changes", ())]
        if not lines:
            return content
        if not self.config.allow_changes:
            raise refusal(path, lines)
        for line in lines:
            now["changes"].append(f"changed at step {content['step']['steps']}: {line}")
            self.say(now["changes"][-1])
        self.epochs.reseeded = before["seed"] != now["seed"]
        return carried_over(content, self.trained, self.task, now, self.say)

    def close(self) -> None:
        """Write what is known, and close everything; also after a failure."""
        step, result = self.trained.step, self.result
        if self._saving is not None:
            self._saving.over()
        if step.slow_rank is not None:
            result.messages.append(step.slow_rank)
        self._record(step.drain())
        result.steps, result.epochs = step.steps, self.epochs.position.epoch
        result.loss_scale = step.loss_scale.value
        result.activity = step.activity
        result.samples_per_s = self.rate.per_s or None
        result.host_syncs_per_step = 0 if self.device.type == "cpu" else step.syncs_per_step
        result.data_wait_fraction = self._waits_s / self._total_s if self._total_s else 0.0
        self.trackers.finish()
        self._describe()
        self.folder.close()

    def _describe(self) -> None:
        """Write `run.json`."""
        result = self.result.to_json()
        self.folder.write(
            {
                "command": "train",
                "config": self.makeup,
                "options": self._options,
                "task": dict(self.task.info),
                "policy": self._resolution.to_json(),
                "environment": environment(self.device),
                "result": result,
                "status": result["status"],
            }
        )


def _part_ways(seed: int, rank: int) -> None:
    """Random numbers of its own for each rank but the first, which is as one process alone."""
    if rank:
        seed_all((seed + 0x9E3779B1 * rank) % 2**32)


def _converted(before: str, now: str) -> str:
    """What it means that a run goes on in another precision."""
    pure = [Policy.parse(each).pure for each in (before, now)]
    held = "are float32 in both"
    if any(pure):
        held = "stay bfloat16" if all(pure) else "are raised to float32"
        held = held if pure[0] else "are rounded to bfloat16"
    return (
        f"converted from {before} to {now}: weights and optimizer state {held}, the loss scale is "
        "kept only if both use one"
    )


def _due(every: int | None, steps: int, epoch_end: bool) -> bool:
    return epoch_end if every is None else steps > 0 and steps % every == 0


def _scheduler(optimizer: Optimizer, config: TrainConfig) -> LambdaLR | None:
    if config.schedule == "constant" and not config.warmup_steps:
        return None

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant":
            return 1.0
        assert config.steps is not None
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)
