"""The main job: every precision side by side on one task; what each buys, and what to use.

1. `trial`: each precision but fp32 makes its first step in a process that can be killed
2. `memory`: peak memory of whole steps, each arm alone
3. `race`: all arms resident and in turns
4. `parity`: each precision trains to a stated budget, under several seeds
5. `levers`: what else helps, one at a time
6. `requirements` and `verdict`

The raced steps are real training steps on the task's batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from ampwise.bench.arm import Arm, Settings, Variant
from ampwise.bench.contamination import Watch
from ampwise.bench.equivalence import MAX_SEEDS
from ampwise.bench.levers import Levers, measure_levers, refit
from ampwise.bench.memory import measure
from ampwise.bench.parity import (
    ParityPlan,
    ParityReport,
    check_metric,
    has_quality,
    run_parity,
    steps_that_fit,
)
from ampwise.bench.race import (
    FAILURES,
    Race,
    run_race,
    speedups,
    why_it_fell_out,
)
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.trial import limit_from, reference_step, slow, try_first_step
from ampwise.bench.verdict import verdict
from ampwise.capability import DeviceCapability, multiplies_float8, probe
from ampwise.errors import kind_and_words
from ampwise.installation import extra_command
from ampwise.policy import PRESETS, Policy
from ampwise.stats import typical
from ampwise.step.precision import by_reason
from ampwise.tasks import Task
from ampwise.tasks.checks import endless, first_batch, samples_in, trained_on
from ampwise.telemetry.environment import environment

MEMORY_STEPS = 3
BASELINE = "fp32"
CONTROL = "fp32 again"
"""A second float32 arm: how far two equal arms seem to lie apart is the noise of the machine."""
_EMULATED = (
    "emulated: float8 is multiplied in float32 here, so speed says nothing, and the memory "
    "includes what that takes"
)


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
    max_seeds
        Paired seeds for parity, at most; 0 leaves it out.
    parity_steps
        Steps of each of its training runs; None for what fits into `parity_budget_s` at five seeds.
    parity_budget_s
        Seconds after which no further seed starts.
    metric
        What parity compares; None for the task's own.
    levers_s
        Seconds for the race of each lever beside precision; 0 leaves them out.
    compiled
        Whether `torch.compile` is one of them.
    """

    device: torch.device
    precisions: Sequence[Policy] | None = None
    seed: int = 0
    accumulate: int = 1
    max_grad_norm: float | None = None
    max_rounds: int = 200
    budget_s: float = 300.0
    max_seeds: int = MAX_SEEDS
    parity_steps: int | None = None
    parity_budget_s: float = 900.0
    metric: str | None = None
    levers_s: float = 0.0
    compiled: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def settings(self) -> Settings:
        """What every arm shares."""
        return Settings(self.device, self.seed, self.accumulate, self.max_grad_norm)


class Progress(Protocol):
    """Who wants to know how far a bench is."""

    def stage(self, what: str) -> None:
        """Something begins."""

    def round(self, race: Race) -> None:
        """A round of the race ended."""

    def seed(self, name: str, seed: int, planned: int) -> None:
        """A precision starts to train under a seed."""


def run_bench(
    task: Task,
    config: BenchConfig,
    progress: Progress,
    failed: Callable[[BenchReport], object] = lambda _: None,
) -> BenchReport:
    """Measure a task in every precision.

    Interrupting (Ctrl-C) during the race ends it; the report then says so, with what there is.

    Parameters
    ----------
    failed
        Given the report so far when an error ends the run after something was measured; the error
        is raised afterwards.

    Raises
    ------
    TaskError
        When the task does not keep its contract.
    """
    capability = probe(config.device)
    policies, left_out = choose(config.precisions, capability)
    report = _begun(task, config, policies, capability)
    report.left_out = left_out
    with torch.random.fork_rng():
        batch = first_batch(task)
        try:
            _measure(task, config, policies, report, progress)
        except KeyboardInterrupt:
            report.interrupted = True
        except Exception as error:
            if report.precisions[0].memory:
                report.failed = kind_and_words(error)
                _conclude(report, config, samples_in(task, batch))
                failed(report)
            raise
        _conclude(report, config, samples_in(task, batch))
    return report


def _begun(
    task: Task, config: BenchConfig, policies: Sequence[Policy], capability: DeviceCapability
) -> BenchReport:
    """A report in which nothing is measured yet."""
    return BenchReport(
        task=task.name or "task",
        device=str(config.device),
        environment=environment(config.device),
        task_info=dict(task.info),
        unit=str(task.info.get("samples", "samples")),
        precisions=[
            PrecisionResult(
                policy.text,
                note=_note(policy, capability),
                emulated=_emulated(policy, config.device),
                matmul_speedup=_matmul_speedup(policy, capability),
            )
            for policy in policies
        ],
    )


def _conclude(report: BenchReport, config: BenchConfig, samples_per_step: int) -> None:
    """Ratios, requirements and verdict, of whatever was measured."""
    baseline = report.precisions[0]
    ended = report.ended if config.max_seeds else ""
    complaints = [] if report.contamination is None else report.contamination.complaints()
    for result in report.precisions[1:]:
        _compare(result, baseline)
        _note_parity(result, baseline, report.parity)
        result.requirements = judge(
            result,
            config.thresholds,
            report.parity,
            report.noise,
            ended,
            disturbed=bool(complaints),
        )
    for result in report.precisions:
        if result.step_ms is not None:
            result.samples_per_s = samples_per_step / result.step_ms.median * 1e3
    report.notes += [f"while the race ran, {complaint}" for complaint in complaints]
    if report.contamination is not None and report.contamination.gpu is not None:
        report.notes += report.contamination.gpu.gaps()
    report.verdict = verdict(report, config.thresholds)


def choose(
    asked: Sequence[Policy] | None, capability: DeviceCapability
) -> tuple[list[Policy], dict[str, str]]:
    """The policies to measure, fp32 first, and the presets left out with the reason.

    Default: every preset whose format gains on the device and that leaves the model as it is, and
    fp16. Where none gains, bf16 is
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
        if policy.pure:
            left_out[name] = "it changes what the model holds; name it to measure it"
        elif policy.float8 and support.gains and not find_spec("torchao"):
            left_out[name] = f"torchao is not installed: {extra_command('fp8')}"
        elif support.gains or name == "fp16" or (name == "bf16" and nothing_gains):
            chosen.append(policy)
        else:
            left_out[name] = support.reason
    return chosen, left_out


def _matmul_speedup(policy: Policy, capability: DeviceCapability) -> float | None:
    support = capability.formats.get(policy.compute_format)
    return None if support is None else support.measured.speedup


def _emulated(policy: Policy, device: torch.device) -> str:
    return _EMULATED if policy.float8 and not multiplies_float8(device) else ""


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
    settings = config.settings
    batches = list(itertools.islice(trained_on(task.batches), MEMORY_STEPS))
    makers = {each.text: _maker(task, each, settings) for each in policies}
    results = {each.name: each for each in report.precisions}

    if config.max_seeds:  # what parity would trip over after minutes is said now
        check_metric(config.metric, makers[BASELINE]().held_out())
    progress.stage("first step of each precision")
    _first_steps(makers, batches[0], policies, results, config.device)

    for name, result in results.items():
        if result.status == "measured":
            progress.stage(f"peak memory of {name}")
            _note_memory(makers[name], batches, result, config.device)

    running = [policy for policy in policies if results[policy.text].status == "measured"]
    _race(task, config, [makers[each.text] for each in running], report, progress)

    running = [policy for policy in policies if results[policy.text].status == "measured"]
    if config.max_seeds:
        progress.stage("parity")
        report.parity = ParityReport()
        taught = _taught(task, config, running, results, report.parity)
        plan = _plan(config, [results[policy.text] for policy in taught])
        variants = [Variant.plain(task, each) for each in taught]
        run_parity(task, variants, settings, plan, report.parity, progress.seed)
    if config.levers_s:
        report.levers = Levers()
        _levers(task, config, running, batches, report, progress)


def _race(
    task: Task,
    config: BenchConfig,
    makers: Sequence[Callable[[], Arm]],
    report: BenchReport,
    progress: Progress,
) -> None:
    """All arms resident and in turns; their memory is free again afterwards."""
    progress.stage("race")
    results = {each.name: each for each in report.precisions}
    arms, race = [make() for make in makers], Race()
    control = makers[0]()
    control.name = CONTROL
    for arm in arms:
        results[arm.name].loss_before = arm.held_out().get("loss")
    watch = Watch(config.device)
    try:
        run_race(
            [arms[0], control, *arms[1:]],
            endless(task),
            race,
            max_rounds=config.max_rounds,
            budget_s=config.budget_s,
            progress=progress.round,
            after_turn=watch.after_turn,
        )
    finally:
        _note_race(race, results, report)
        report.contamination = watch.read()
    del control
    progress.stage("held-out loss")
    batch = first_batch(task)
    for arm in arms:
        _note_arm(arm, batch, results[arm.name])
        if arm.step.left_out:
            report.notes.append(f"{arm.name}: not in float8: {by_reason(arm.step.left_out)}")


def _levers(
    task: Task,
    config: BenchConfig,
    policies: Sequence[Policy],
    batches: Sequence[Any],
    report: BenchReport,
    progress: Progress,
) -> None:
    """Levers beside precision, in the fastest precision that may be used."""
    assert report.levers is not None
    results = {each.name: each for each in report.precisions}

    def speed(policy: Policy) -> float:
        found = results[policy.text].speedup
        return 1.0 if found is None else found.median

    policy = max(policies, key=speed)
    measure_levers(
        task,
        policy,
        config.settings,
        batches,
        report.levers,
        compiled=config.compiled,
        budget_s=config.levers_s,
        progress=lambda name: progress.stage(f"lever: {name}"),
    )
    usable = [each for each in policies if not results[each.text].emulated]
    smallest = min(usable, key=lambda each: results[each.text].peak_memory_bytes or math.inf)
    limit = results[BASELINE].peak_memory_bytes
    if smallest.autocast and limit:
        progress.stage("the batch that fits into fp32's memory")
        report.levers.refit = refit(
            task, smallest, config.settings, batches[0], limit, config.levers_s
        )


HOPELESS = 5
"""Times float32's step from which on nobody trains in a precision."""


def _taught(
    task: Task,
    config: BenchConfig,
    policies: Sequence[Policy],
    results: Mapping[str, PrecisionResult],
    parity: ParityReport,
) -> list[Policy]:
    """Precisions to train for parity: all that were asked for, else those with a usable speed."""
    baseline = results[policies[0].text].step_ms
    kept: list[Policy] = []
    for policy in policies:
        step = results[policy.text].step_ms
        times = step.median / baseline.median if step and baseline else 1.0
        if policy is not policies[0] and not has_quality(task):
            parity.left_out[policy.text] = (
                "the loss that an iteration reports is no measure of quality; give the task "
                "evaluate()"
            )
        elif config.precisions is None and config.parity_steps is None and times > HOPELESS:
            parity.left_out[policy.text] = (
                f"a step takes {times:.0f} times as long as in {BASELINE}: training in it would "
                f"take the time of all others; --precisions {policy.text} compares it"
            )
        else:
            kept.append(policy)
    return kept


def _plan(config: BenchConfig, results: Sequence[PrecisionResult]) -> ParityPlan:
    """Training runs of the asked length, or of one that leaves room for the first look."""
    steps = config.parity_steps
    if steps is None:
        step_s = sum(each.step_ms.median for each in results if each.step_ms) / 1e3
        steps = steps_that_fit(step_s * config.accumulate, config.parity_budget_s)
    return ParityPlan(
        steps,
        config.max_seeds,
        config.thresholds.accuracy_difference,
        config.metric,
        config.parity_budget_s,
    )


def _note_parity(
    result: PrecisionResult, baseline: PrecisionResult, parity: ParityReport | None
) -> None:
    """A precision's own part of the parity report."""
    found = None if parity is None else parity.arms.get(result.name)
    if parity is None or found is None:
        return
    finals = parity.finals[result.name]
    result.accuracy = {
        "metric": parity.metric,
        "mean": sum(finals) / len(finals),
        "difference": found.difference,
        "low": found.low,
        "high": found.high,
        "equivalent": {"equivalent": True, "different": False}.get(found.decision),
        "p": found.p_equivalent,
        "seeds": found.seeds,
    }
    finals = parity.finals[baseline.name]
    baseline.accuracy = {"metric": parity.metric, "mean": sum(finals) / len(finals)}
    if result.name in parity.losses:
        result.loss_difference = parity.losses[result.name].difference


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
    reference = reference_step(makers[baseline.text], batch)
    results[baseline.text].resident_bytes = reference.resident_bytes
    for policy in others:
        result = results[policy.text]
        trial = try_first_step(makers[policy.text], batch, limit_from(reference))
        result.resident_bytes = trial.resident_bytes
        if trial.error:
            result.status, result.reason = "failed", f"{policy.text}: {trial.error}"
        elif trial.hopeless(reference) and not (trial.finished and result.emulated):
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
        result.status, result.reason = "failed", f"{result.name}: {why_it_fell_out(error)}"
        return
    result.peak_memory_bytes, result.memory = use.peak_bytes, use.parts


def _note_race(race: Race, results: dict[str, PrecisionResult], report: BenchReport) -> None:
    """Times, speedups and fall-outs, also of a race that was interrupted."""
    report.rounds = race.rounds
    for name, why in race.fell_out.items():
        if name == CONTROL:  # float32 after all, and no precision of the report
            report.notes.append(f"{name} fell out, so the noise of the machine is not known: {why}")
            continue
        results[name].status, results[name].reason = "failed", f"{name}: {why}"
    for name, times in race.times_ms.items():
        if name in results and name not in race.fell_out and race.rounds:
            results[name].step_ms = typical(times[: race.rounds])
    found = speedups(race, BASELINE)
    report.noise = found.pop(CONTROL, None)
    if report.noise is not None and not report.noise.low <= 1 <= report.noise.high:
        report.notes.append(
            f"fp32 against itself reads {report.noise}, and not 1: what is measured is off by that "
            "much beside its intervals; run longer (--steps), or on a quieter machine"
        )
    for name, speedup in found.items():
        if not results[name].emulated:
            results[name].speedup = speedup
    if race.rounds and race.times_ms.get(BASELINE):
        report.loading_ms = race.loading_s / race.rounds * 1e3
    emulated = [each for each in results.values() if each.emulated]
    report.notes += [f"{each.name} is {each.emulated}" for each in emulated]
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
    policy = arm.step.policy
    others = result.matmul_dtypes.keys() - {policy.compute_dtype, policy.compute_format}
    if policy.autocast and others and not policy.islands:  # which are meant
        result.exceptions = arm.odd_products(batch)


def _compare(result: PrecisionResult, baseline: PrecisionResult) -> None:
    if result.peak_memory_bytes is not None and baseline.peak_memory_bytes:
        result.memory_reduction = 1 - result.peak_memory_bytes / baseline.peak_memory_bytes
    if result.loss_after is not None and baseline.loss_after is not None:
        result.loss_difference = result.loss_after - baseline.loss_after


def _maker(task: Task, policy: Policy, settings: Settings) -> Callable[[], Arm]:
    return lambda: Arm(task, policy, settings)
