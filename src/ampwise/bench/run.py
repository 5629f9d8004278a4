"""The main job: every precision side by side on one task; what each buys, and what to use.

1. `trial`: each precision but fp32 makes its first step in a process that can be killed
2. `memory`: peak memory of whole steps, each arm alone
3. `race`: all arms resident and in turns
4. `requirements` and `verdict`

The raced steps are real training steps on the task's batches; held-out metrics before and after
say that the arms learn, and how far they lie apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.memory import measure
from ampwise.bench.race import FAILURES, Race, in_one_line, run_race, speedups
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.stats import typical
from ampwise.bench.trial import HOPELESS, limit_from, slow, try_first_step
from ampwise.bench.verdict import verdict
from ampwise.capability import DeviceCapability, probe
from ampwise.policy import PRESETS, Policy
from ampwise.tasks import Task
from ampwise.tasks.checks import first_batch, samples_in, trained_on
from ampwise.telemetry.environment import environment

MEMORY_STEPS = 3
BASELINE = "fp32"


@dataclass(frozen=True)
class BenchConfig:
    """What to measure.

    Attributes
    ----------
    precisions
        Policies beside fp32; None for what the device is good for, and fp16.
    max_rounds
        Rounds after which the race ends undecided.
    budget_s
        Seconds the race may take.
    """

    device: torch.device
    precisions: Sequence[Policy] | None = None
    seed: int = 0
    accumulate: int = 1
    max_grad_norm: float | None = None
    max_rounds: int = 200
    budget_s: float = 300.0
    thresholds: Thresholds = field(default_factory=Thresholds)


class Progress(Protocol):
    """Who wants to know how far a bench is."""

    def stage(self, what: str) -> None:
        """Something begins."""

    def round(self, race: Race) -> None:
        """A round of the race ended."""


def run_bench(task: Task, config: BenchConfig, progress: Progress) -> BenchReport:
    """Measure a task in every precision.

    Interrupting (Ctrl-C) during the race ends it; the report then says so, with what there is.

    Raises
    ------
    TaskError
        When the task does not keep its contract.
    """
    capability = probe(config.device)
    policies, left_out = choose(config.precisions, capability)
    report = BenchReport(
        task=task.name or "task",
        device=str(config.device),
        environment=environment(config.device),
        task_info=dict(task.info),
        unit=str(task.info.get("samples", "samples")),
        left_out=left_out,
        precisions=[
            PrecisionResult(policy.text, note=_note(policy, capability)) for policy in policies
        ],
    )
    with torch.random.fork_rng():
        batch = first_batch(task)
        try:
            _measure(task, config, policies, report, progress)
        except KeyboardInterrupt:
            report.interrupted = True
    baseline = report.precisions[0]
    for result in report.precisions[1:]:
        _compare(result, baseline)
        result.requirements = judge(result, config.thresholds)
    for result in report.precisions:
        if result.step_ms is not None:
            per_step = samples_in(task, batch)
            result.samples_per_s = per_step / result.step_ms.median * 1e3
    report.verdict = verdict(report, config.thresholds)
    return report


def choose(
    asked: Sequence[Policy] | None, capability: DeviceCapability
) -> tuple[list[Policy], dict[str, str]]:
    """The policies to measure, fp32 first, and the presets left out with the reason.

    Default: every preset whose format gains on the device, and fp16. Where none gains, bf16 is
    measured too, so that the report shows what it costs rather than asserts it.
    """
    baseline = PRESETS[BASELINE]
    if asked is not None:
        return [baseline, *(each for each in asked if each != baseline)], {}
    chosen, left_out = [baseline], dict[str, str]()
    nothing_gains = not any(each.gains for each in capability.formats.values())
    for name, policy in PRESETS.items():
        support = capability.formats.get(policy.compute_format)
        if support is None:
            continue
        if support.gains or name == "fp16" or (name == "bf16" and nothing_gains):
            chosen.append(policy)
        else:
            left_out[name] = support.reason
    return chosen, left_out


def _note(policy: Policy, capability: DeviceCapability) -> str:
    support = capability.formats.get(policy.compute_format)
    return "" if support is None or support.gains else support.reason


def _measure(
    task: Task,
    config: BenchConfig,
    policies: Sequence[Policy],
    report: BenchReport,
    progress: Progress,
) -> None:
    """Fill the report's precisions, stage by stage."""
    settings = Settings(config.device, config.seed, config.accumulate, config.max_grad_norm)
    batches = list(itertools.islice(trained_on(task.batches), MEMORY_STEPS))
    makers = {each.text: _maker(task, each, settings) for each in policies}
    results = {each.name: each for each in report.precisions}

    progress.stage("first step of each precision")
    _first_steps(makers, batches[0], policies, results, config.device)

    for name, result in results.items():
        if result.status == "measured":
            progress.stage(f"peak memory of {name}")
            _note_memory(makers[name], batches, result, config.device)

    progress.stage("the race")
    arms = [makers[name]() for name, result in results.items() if result.status == "measured"]
    for arm in arms:
        results[arm.name].loss_before = arm.held_out().get("loss")
    race = Race()
    try:
        run_race(
            arms,
            _endless(task),
            race,
            max_rounds=config.max_rounds,
            budget_s=config.budget_s,
            progress=progress.round,
        )
    finally:
        _note_race(race, results, report)
    progress.stage("held-out loss")
    for arm in arms:
        _note_arm(arm, batches[0], results[arm.name])


def _first_steps(
    makers: dict[str, Callable[[], Arm]],
    batch: Any,
    policies: Sequence[Policy],
    results: dict[str, PrecisionResult],
    device: torch.device,
) -> None:
    """Find the hopeless and the broken before they can hold up the others."""

    baseline, *others = policies
    if device.type != "cpu":
        return
    reference = try_first_step(makers[baseline.text], batch, limit_s=600.0)
    if reference.error:
        makers[baseline.text]().run(batch)  # fails here too, with the task's own traceback
    for policy in others:
        result = results[policy.text]
        trial = try_first_step(makers[policy.text], batch, limit_from(reference))
        if trial.error:
            result.status, result.reason = "failed", f"{policy.text}: {trial.error}"
        elif trial.seconds > HOPELESS * reference.seconds:
            result.status = "cut short"
            result.reason = f"{policy.text}: {slow(trial, reference)}"
            if result.note:
                result.reason += f"; {result.note}"


def _note_memory(
    make: Callable[[], Arm], batches: Sequence[Any], result: PrecisionResult, device: torch.device
) -> None:
    """Measure one precision's peak; one that cannot make these steps is out of the race.

    On accelerators, where no first step is tried apart, this is where it shows.
    """
    try:
        use = measure(make, batches, device)
    except FAILURES as error:
        if result.name == BASELINE:
            raise
        result.status, result.reason = "failed", f"{result.name}: {in_one_line(error)}"
        return
    result.peak_memory_bytes, result.memory = use.peak_bytes, use.parts


def _note_race(race: Race, results: dict[str, PrecisionResult], report: BenchReport) -> None:
    """Times, speedups and fall-outs, also of a race that was interrupted."""
    report.rounds = race.rounds
    for name, why in race.fell_out.items():
        results[name].status, results[name].reason = "failed", f"{name}: {why}"
    for name, times in race.times_ms.items():
        if name not in race.fell_out and race.rounds:
            results[name].step_ms = typical(times[: race.rounds])
    for name, speedup in speedups(race, BASELINE).items():
        results[name].speedup = speedup
    for name in sorted(race.launch_bound):
        report.notes.append(f"{name} is bound by launches or input: the GPU waits for the host")


def _note_arm(arm: Arm, batch: Any, result: PrecisionResult) -> None:
    """What an arm says about itself after the race."""
    if result.status != "measured":
        return
    result.loss_after = arm.held_out().get("loss")
    records = arm.step.history
    result.skipped_steps = records[-1].skipped_total if records else 0
    result.host_syncs_per_step = arm.count_host_syncs(batch)
    if arm.step.activity is not None:
        result.matmul_dtypes = dict(arm.step.activity.matmul_dtypes)


def _compare(result: PrecisionResult, baseline: PrecisionResult) -> None:
    if result.peak_memory_bytes is not None and baseline.peak_memory_bytes:
        result.memory_reduction = 1 - result.peak_memory_bytes / baseline.peak_memory_bytes
    if result.loss_after is not None and baseline.loss_after is not None:
        result.loss_difference = result.loss_after - baseline.loss_after


def _maker(task: Task, policy: Policy, settings: Settings) -> Callable[[], Arm]:
    return lambda: Arm(task, policy, settings)


def _endless(task: Task) -> Iterator[Any]:
    while True:
        yield from trained_on(task.batches)
