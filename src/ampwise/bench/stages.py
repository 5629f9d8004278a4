"""The stages of a bench, one after the other; each fills its part of the report."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ampwise.bench.arm import Arm, Variant
from ampwise.bench.config import BASELINE, CONTROL, MEMORY_STEPS, BenchConfig, Progress
from ampwise.bench.contamination import Watch
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
    LEAST_PAIRS,
    TIME_IS_UP,
    Race,
    run_race,
    speedups,
    why_it_fell_out,
)
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.trial import limit_from, reference_step, slow, try_first_step
from ampwise.policy import Policy
from ampwise.stats import typical
from ampwise.step.precision import by_reason
from ampwise.tasks import Task
from ampwise.tasks.checks import endless, first_batch, trained_on
from ampwise_lint.base.words import counted

HOPELESS = 5
"""Times float32's step from which on nobody trains in a precision."""

_ENDS = {"memory": 0.25, "race": 0.4, "held-out loss": 0.45, "parity": 0.8, "levers": 0.9}
"""By when of `BenchConfig.total_s` nothing more of a stage begins."""


class Stages:
    """Fills a report's precisions, parity and levers; each stage needs the ones before it."""

    def __init__(
        self,
        task: Task,
        config: BenchConfig,
        policies: Sequence[Policy],
        report: BenchReport,
        progress: Progress,
    ) -> None:
        self._task, self._config, self._policies = task, config, policies
        self._report, self._progress = report, progress
        self._results = {each.name: each for each in report.precisions}
        self._batches = list(itertools.islice(trained_on(task.batches), MEMORY_STEPS))
        self._began = time.monotonic()

    def run(self) -> None:
        """Make them all."""
        if self._config.max_seeds:  # what parity would trip over after minutes is said now
            check_metric(self._config.metric, self._arm(self._policies[0]).held_out())
        self.first_steps()
        self.memory()
        self.race()
        if self._config.max_seeds:
            self.parity()
        if self._config.levers_s:
            self.levers()

    def first_steps(self) -> None:
        """Find the hopeless and the broken before they can hold up the others."""
        self._progress.stage("first step of each precision")
        baseline, *others = self._policies
        if self._config.device.type != "cpu":
            return
        batch = self._batches[0]
        reference = reference_step(partial(self._arm, baseline), batch)
        self._results[baseline.text].resident_bytes = reference.resident_bytes
        for policy in others:
            result = self._results[policy.text]
            trial = try_first_step(partial(self._arm, policy), batch, limit_from(reference))
            result.resident_bytes = trial.resident_bytes
            if trial.error:
                result.status, result.reason = "failed", f"{policy.text}: {trial.error}"
            elif trial.hopeless(reference) and not (trial.finished and result.emulated):
                result.status = "cut short"
                result.reason = f"{policy.text}: {slow(trial, reference)}"
                if result.note:
                    result.reason += f"; {result.note}"

    def memory(self) -> None:
        """Measure the peak of each precision; one that cannot make these steps is out of the race.

        On accelerators, where no first step is tried apart, this is where it shows.
        """
        for policy in self._running():
            if self._is_over("memory"):
                self._report.notes.append(f"peak memory: {TIME_IS_UP}")
                return
            result = self._results[policy.text]
            self._progress.stage(f"peak memory of {policy.text}")
            try:
                use = measure(partial(self._arm, policy), self._batches, self._config.device)
            except FAILURES as error:
                if policy.text == BASELINE:
                    raise
                reason = f"{policy.text}: {why_it_fell_out(error)}"
                result.status, result.reason = "failed", reason
                continue
            result.peak_memory_bytes, result.memory = use.peak_bytes, use.parts

    def race(self) -> None:
        """All arms resident and in turns; their memory is free again afterwards."""
        self._progress.stage("race")
        report = self._report
        arms, race = [self._arm(each) for each in self._running()], Race()
        control = self._arm(self._policies[0])
        control.name = CONTROL
        watch = Watch(self._config.device)
        for arm in arms:
            if not self._is_over("memory"):
                self._results[arm.name].loss_before = arm.held_out().get("loss")
        try:
            run_race(
                [arms[0], control, *arms[1:]],
                endless(self._task),
                race,
                max_rounds=self._config.max_rounds,
                budget_s=min(self._config.budget_s, self._deadline("race") - time.monotonic()),
                progress=self._progress.round,
                after_turn=watch.after_turn,
            )
        finally:
            note_race(race, self._results, report)
            emulated = [each for each in self._results.values() if each.emulated]
            report.notes += [f"{each.name} is {each.emulated}" for each in emulated]
            report.contamination = watch.read()
        self._progress.stage("held-out loss")
        batch = first_batch(self._task)
        for arm in arms:
            if self._is_over("held-out loss"):
                report.notes.append(f"held-out loss: {TIME_IS_UP}")
                break
            _note_arm(arm, batch, self._results[arm.name])
            if arm.step.left_out:
                report.notes.append(f"{arm.name}: not in float8: {by_reason(arm.step.left_out)}")

    def parity(self) -> None:
        """Train seed after seed in each precision that has a usable speed."""
        self._progress.stage("parity")
        self._report.parity = ParityReport()
        taught = to_train(
            self._task, self._config, self._running(), self._results, self._report.parity
        )
        budget_s, deadline = self._config.parity_budget_s, self._deadline("parity")
        plan = ParityPlan(
            self._steps(taught, min(budget_s, deadline - time.monotonic())),
            self._config.max_seeds,
            self._config.thresholds.accuracy_difference,
            self._config.metric,
            budget_s,
            deadline,
        )
        variants = [Variant.plain(self._task, each) for each in taught]
        settings, shown = self._config.settings, self._progress.seed
        run_parity(self._task, variants, settings, plan, self._report.parity, shown)

    def levers(self) -> None:
        """What helps beside precision, in the fastest precision that may be used."""
        self._report.levers = Levers()
        results, settings = self._results, self._config.settings
        budget_s, deadline = self._config.levers_s, self._deadline("levers")

        def speed(policy: Policy) -> float:
            found = results[policy.text].speedup
            return 1.0 if found is None else found.median

        measure_levers(
            self._task,
            max(self._running(), key=speed),
            settings,
            self._batches,
            self._report.levers,
            compiled=self._config.compiled,
            budget_s=budget_s,
            deadline=deadline,
            progress=lambda name: self._progress.stage(f"lever: {name}"),
        )
        usable = [each for each in self._running() if not results[each.text].emulated]
        smallest = min(usable, key=lambda each: results[each.text].peak_memory_bytes or math.inf)
        limit = results[BASELINE].peak_memory_bytes
        if smallest.autocast and limit and not self._is_over("levers"):
            self._progress.stage("the batch that fits into fp32's memory")
            self._report.levers.refit = refit(
                self._task, smallest, settings, self._batches[0], limit, budget_s, deadline
            )

    def _arm(self, policy: Policy) -> Arm:
        return Arm(self._task, policy, self._config.settings)

    def _running(self) -> list[Policy]:
        return [each for each in self._policies if self._results[each.text].status == "measured"]

    def _deadline(self, stage: str) -> float:
        """When a stage has to end, by the monotonic clock."""
        return self._began + _ENDS[stage] * self._config.total_s

    def _is_over(self, stage: str) -> bool:
        return time.monotonic() > self._deadline(stage)

    def _steps(self, taught: Sequence[Policy], budget_s: float) -> int:
        """Steps of a training run: those asked for, or what leaves room for the first look."""
        if self._config.parity_steps is not None:
            return self._config.parity_steps
        taken = [step for each in taught if (step := self._results[each.text].step_ms)]
        step_s = sum(each.median for each in taken) / 1e3 * self._config.accumulate
        return steps_that_fit(step_s, budget_s)


def to_train(
    task: Task,
    config: BenchConfig,
    policies: Sequence[Policy],
    results: Mapping[str, PrecisionResult],
    parity: ParityReport,
) -> list[Policy]:
    """Precisions to train for parity: all that were asked for, else those with a usable speed."""
    kept: list[Policy] = []
    baseline = results[policies[0].text].step_ms
    by_default = config.precisions is None and config.parity_steps is None
    for policy in policies:
        step = results[policy.text].step_ms
        times = step.median / baseline.median if step and baseline else 1.0
        if policy is not policies[0] and not has_quality(task):
            parity.left_out[policy.text] = (
                "the loss that an iteration reports is no measure of quality; give the task "
                "evaluate()"
            )
        elif by_default and times > HOPELESS:
            parity.left_out[policy.text] = (
                f"a step takes {times:.0f} times as long as in {BASELINE}: training in it would "
                f"take the time of all others; --precisions {policy.text} compares it"
            )
        else:
            kept.append(policy)
    return kept


def note_race(race: Race, results: dict[str, PrecisionResult], report: BenchReport) -> None:
    """Times, speedups and fall-outs, also of a race that was interrupted."""
    report.rounds = race.rounds
    for name, why in race.fell_out.items():
        if name == CONTROL:  # float32 after all, and no precision of the report
            report.notes.append(f"{name} fell out, so the noise of the machine is not known: {why}")
            continue
        results[name].status, results[name].reason = "failed", f"{name}: {why}"
    for name in sorted(race.launch_bound):
        report.notes.append(f"{name} is bound by launches or input: the GPU waits for the host")
    if race.rounds < min(LEAST_PAIRS, race.planned):
        report.notes.append(f"race: {counted(race.rounds, 'round')} decide nothing")
    else:
        _note_times(race, results, report)


def _note_times(race: Race, results: dict[str, PrecisionResult], report: BenchReport) -> None:
    for name, times in race.times_ms.items():
        if name in results and name not in race.fell_out:
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
    if race.rounds:
        report.loading_ms = race.loading_s / race.rounds * 1e3


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
