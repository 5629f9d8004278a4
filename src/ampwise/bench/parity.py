"""Does a precision train as well as float32? Paired seeds, to a stated number of steps.

A seed fixes initial weights, data order and dropout; under it float32 and every precision train the
same number of steps and are evaluated on the same held-out data. Over the second half the learning
rate falls to zero, as it does in runs that are meant to end: at a constant rate the last few steps
decide where a run stands, and the paired differences spread three times as wide. Seeds are added
until each precision is decided by `ampwise.bench.equivalence`, or there are enough.

The metric is the first that the task's `evaluate` gives, or another of them by name. Accuracies are
compared by their difference; losses, which have no unit of their own, by their difference relative
to float32's. A task on which float32 itself learns nothing decides nothing: there
everything is as good as everything else there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.equivalence import ALPHA, FIRST_LOOK, Decision, Parity, decide, seeds_needed
from ampwise.bench.race import FAILURES, in_one_line
from ampwise.errors import TaskError, UsageError
from ampwise.policy import Policy
from ampwise.tasks import Task
from ampwise.tasks.checks import endless, higher_is_better

CURVE_POINTS = 200


@dataclass(frozen=True)
class ParityPlan:
    """How much to train.

    Attributes
    ----------
    steps
        Optimizer steps of each training run.
    max_seeds
        Seeds after which an arm stays undecided; the first look is after 5, or after all if fewer.
    margin
        Differences below this do not matter: absolute, or relative for losses.
    metric
        Name of the metric; None for the first that the task gives.
    budget_s
        Seconds after which no further seed starts.
    """

    steps: int
    max_seeds: int
    margin: float
    metric: str | None = None
    budget_s: float = math.inf

    @property
    def first_look(self) -> int:
        """Seeds at which arms are judged for the first time."""
        return min(FIRST_LOOK, self.max_seeds)

    @property
    def looks(self) -> int:
        """How often arms are judged, at most."""
        return self.max_seeds - self.first_look + 1


@dataclass
class Run:
    """One training run: the record of each step, held-out metrics, and what ended it early."""

    losses: list[float]
    metrics: dict[str, float]
    error: str = ""
    scales: list[float] = field(default_factory=list[float])
    skipped: list[int] = field(default_factory=list[int])


@dataclass
class ParityReport:
    """What paired training says.

    Attributes
    ----------
    metric, relative, margin
        What was compared, and whether relative to float32's value.
    higher_is_better
        Its direction.
    steps, seeds
        Training runs' length, and seeds that every undecided arm ran.
    learning
        Whether float32 learnt; `why_not` says how that was seen otherwise.
    arms
        Per precision the statistics of the metric.
    losses
        Per precision the statistics of the held-out loss, relative to float32's.
    finals
        Per precision (float32 too) the metric after each seed's run.
    curves
        Per precision the training loss over steps: ``step``, ``mean``, ``low`` and ``high`` over
        seeds.
    scales
        Per precision that scales its loss, of the first seed's run: the loss ``scale`` of each
        ``step``, and the steps that were ``skipped``.
    needed
        Per undecided precision the seeds that would decide it.
    errors
        Per precision what ended a run early.
    """

    metric: str = ""
    relative: bool = False
    margin: float = 0.0
    higher_is_better: bool = True
    steps: int = 0
    seeds: int = 0
    learning: bool = True
    why_not: str = ""
    arms: dict[str, Parity] = field(default_factory=dict[str, Parity])
    losses: dict[str, Parity] = field(default_factory=dict[str, Parity])
    finals: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    curves: dict[str, dict[str, list[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    scales: dict[str, dict[str, list[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    needed: dict[str, int] = field(default_factory=dict[str, int])
    errors: dict[str, str] = field(default_factory=dict[str, str])

    def worse(self, name: str) -> bool:
        """Whether an arm's difference points to the worse side."""
        difference = self.arms[name].difference
        return not math.isfinite(difference) or (difference < 0) == self.higher_is_better


def run_parity(
    task: Task,
    policies: Sequence[Policy],
    settings: Settings,
    plan: ParityPlan,
    report: ParityReport,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> None:
    """Train under seed after seed until every precision is decided; fills `report` as it goes.

    Parameters
    ----------
    policies
        float32 first.
    report
        Valid after each seed, also when an exception (Ctrl-C) ends the runs.
    progress
        Told the precision, the seed (from 1) and the seeds planned, before each run.

    Raises
    ------
    UsageError
        When the asked metric is not among those the task's `evaluate` gives.
    """
    baseline, *others = policies
    runs: dict[str, list[Run]] = {policy.text: [] for policy in policies}
    untrained: list[dict[str, float]] = []
    undecided, started = list(others), time.monotonic()
    report.steps, report.margin = plan.steps, plan.margin
    for seed in range(plan.max_seeds):
        # The first look is worth waiting for, up to a point.
        patience = plan.budget_s * (2 if seed < plan.first_look else 1)
        if not undecided or (seed and time.monotonic() - started > patience):
            break
        for policy in [baseline, *undecided]:
            progress(policy.text, seed + 1, plan.max_seeds)
            run = _train(task, policy, settings, seed, plan.steps, untrained)
            runs[policy.text].append(run)
            if seed == 0 and policy is baseline:
                _choose_metric(task, plan.metric, run.metrics, report)
        report.seeds = seed + 1
        _fill(task, runs, untrained, plan, report)
        if report.seeds >= plan.first_look:
            undecided = [each for each in undecided if _decision(report, each) == "undecided"]


def _decision(report: ParityReport, policy: Policy) -> Decision:
    return report.arms[policy.text].decision


def _train(
    task: Task,
    policy: Policy,
    settings: Settings,
    seed: int,
    steps: int,
    untrained: list[dict[str, float]],
) -> Run:
    """One run; its baseline's metrics before training go to `untrained`, once a seed."""
    arm = Arm(task, policy, dataclasses.replace(settings, seed=settings.seed + seed))
    if len(untrained) == seed:
        untrained.append(arm.held_out())
    batches, error, total = endless(task), "", steps * settings.accumulate
    rates = [float(group["lr"]) for group in arm.optimizer.param_groups]
    try:
        for index in range(total):
            _set_rates(arm, rates, min(1.0, 2 * (total - index) / total))
            # Whatever a precision drew at random, the next step starts alike in all of them.
            torch.manual_seed((settings.seed + seed) * 1_000_003 + index)
            arm.run(next(batches))
    except FAILURES as failure:
        if policy.name == "fp32":
            raise
        error = in_one_line(failure)
    history = arm.step.history
    return Run(
        losses=[record.loss for record in history],
        metrics={} if error else arm.held_out(),
        error=error,
        scales=[record.loss_scale for record in history] if arm.step.loss_scale.enabled else [],
        skipped=[record.step for record in history if record.skipped],
    )


def _set_rates(arm: Arm, rates: Sequence[float], factor: float) -> None:
    for group, rate in zip(arm.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def check_metric(asked: str | None, metrics: Mapping[str, float]) -> None:
    """Refuse what cannot be compared: a metric the task does not give, or one that is no number.

    Raises
    ------
    UsageError
        For an unknown metric.
    TaskError
        For NaN or inf of a model in float32.
    """
    if asked is not None and asked not in metrics:
        raise UsageError(
            f"metric {asked!r}: the task's evaluate() gives {', '.join(metrics) or 'no metrics'}"
        )
    compared = asked or next(iter(metrics), None)
    if compared is not None and not math.isfinite(metrics[compared]):
        raise TaskError(
            f"task evaluate() gives {metrics[compared]} as {compared} of a model in fp32: expected "
            "a finite number; leave parity out with --seeds 0"
        )


def _choose_metric(
    task: Task, asked: str | None, metrics: Mapping[str, float], report: ParityReport
) -> None:
    check_metric(asked, metrics)
    report.metric = asked or next(iter(metrics), "training loss")
    report.relative = "loss" in report.metric
    report.higher_is_better = higher_is_better(task, report.metric)


def _fill(
    task: Task,
    runs: Mapping[str, Sequence[Run]],
    untrained: Sequence[Mapping[str, float]],
    plan: ParityPlan,
    report: ParityReport,
) -> None:
    """Judge what there is; an arm that was decided at an earlier look stays so."""
    decided = {n: p for n, p in report.arms.items() if p.decision != "undecided"}
    names = list(runs)
    baseline, others = names[0], names[1:]
    finals = {name: [_final(run, report.metric) for run in runs[name]] for name in names}
    losses = {name: [_final(run, "loss") for run in runs[name]] for name in names}
    report.finals = finals
    early = report.seeds < plan.first_look

    def judged(values: Mapping[str, Sequence[float]], *, relative: bool) -> dict[str, Parity]:
        differences = {
            name: _differences(values[baseline], values[name], relative=relative) for name in others
        }
        found = decide(differences, plan.margin, plan.looks)
        if early:  # before the first look nothing is decided
            found = {n: dataclasses.replace(p, decision="undecided") for n, p in found.items()}
        return found

    report.arms = judged(finals, relative=report.relative) | decided
    report.losses = judged(losses, relative=True) if _all_finite(losses[baseline]) else {}
    report.needed = {
        name: needed
        for name, parity in report.arms.items()
        if parity.decision == "undecided"
        and (needed := seeds_needed(parity, plan.margin, plan.looks * len(others))) is not None
    }
    report.errors = {name: run.error for name in others for run in runs[name] if run.error}
    report.curves = {name: _curve([run.losses for run in runs[name]]) for name in names}
    report.scales = {
        name: _scale_of(runs[name][0]) for name in names if runs[name] and runs[name][0].scales
    }
    report.learning, report.why_not = _learning(task, finals[baseline], untrained, report)


def _final(run: Run, metric: str) -> float:
    """A run's metric at its end; of one that ended early, or without it, the training loss."""
    if run.error:
        return math.nan
    if metric in run.metrics:
        return run.metrics[metric]
    tail = run.losses[-max(1, len(run.losses) // 10) :]
    return float(np.mean(tail)) if tail else math.nan


def _differences(baseline: Sequence[float], arm: Sequence[float], *, relative: bool) -> list[float]:
    pairs = list(zip(baseline, arm, strict=False))  # a decided arm has fewer
    return [(b - a) / (abs(a) if relative else 1.0) for a, b in pairs]


def _learning(
    task: Task,
    finals: Sequence[float],
    untrained: Sequence[Mapping[str, float]],
    report: ParityReport,
) -> tuple[bool, str]:
    """Whether float32 beat a model that has learnt nothing, by more than the margin."""
    metric = report.metric
    if metric in task.chance:
        reference, said = [task.chance[metric]] * len(finals), f"chance, {task.chance[metric]:.4g}"
    elif all(metric in each for each in untrained):
        reference = [each[metric] for each in untrained]
        said = f"before training, {np.mean(reference):.4g}"
    else:
        start = report.curves[next(iter(report.curves))]["mean"]
        reference, said = [start[0]] * len(finals), f"in the first step, {start[0]:.4g}"
    sign = 1 if report.higher_is_better else -1
    gains = [
        sign * (after - before) / (abs(before) if report.relative else 1.0)
        for after, before in zip(finals, reference, strict=True)
    ]
    enough = bool(np.mean(gains) > report.margin)
    if enough and len(gains) > 1 and np.std(gains) > 0:
        test: Any = stats.ttest_1samp(gains, 0, alternative="greater")
        enough = bool(test.pvalue < ALPHA)
    if enough:
        return True, ""
    return False, (
        f"the task is not learning: fp32's {metric} after {report.steps} steps is "
        f"{np.mean(finals):.4g}, {said}; train longer (--parity-steps) or mend the task"
    )


def _curve(losses: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Mean and range over seeds of the loss at up to `CURVE_POINTS` steps."""
    length = min((len(each) for each in losses), default=0)
    if not length:
        return {"step": [], "mean": [], "low": [], "high": []}
    steps = np.unique(np.linspace(0, length - 1, min(length, CURVE_POINTS)).astype(int))
    values = np.array([[each[step] for step in steps] for each in losses])
    return {
        "step": [int(step) + 1 for step in steps],
        "mean": values.mean(0).tolist(),
        "low": values.min(0).tolist(),
        "high": values.max(0).tolist(),
    }


def _scale_of(run: Run) -> dict[str, list[float]]:
    """The loss scale where it changes, and at both ends: it draws as a staircase."""
    scales, last = run.scales, len(run.scales) - 1
    steps = [i for i in range(last + 1) if i in (0, last) or scales[i] != scales[i - 1]]
    return {
        "step": [i + 1.0 for i in steps],
        "scale": [scales[i] for i in steps],
        "skipped": [float(each) for each in run.skipped],
    }


def _all_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))
