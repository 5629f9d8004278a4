"""Does a precision train as well as float32? Paired seeds, to a stated number of steps.

A seed fixes initial weights, data order and dropout; under it float32 and every precision train the
same number of steps and are evaluated on the same held-out data. Over the second half the learning
rate falls to zero, as it does in runs that are meant to end: at a constant rate the last few steps
decide where a run stands, and the paired differences spread three times as wide. Seeds are added
until each precision is decided by `ampwise.bench.equivalence`, or there are enough.

The metric is the first that the task's `evaluate` gives, or another of them by name. Scores between
-1 and 1 of which more is better (an accuracy) are compared by their difference. Everything else, a
loss, an mse, a BLEU of 30, has a unit of its own, and is compared relative to float32's value. A
metric may agree where the loss does not: the loss is compared as well, and what it says is said.
A task on which float32 itself learns nothing decides nothing: everything is as good as everything
else there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

import numpy as np
import torch

from ampwise.bench import student
from ampwise.bench.arm import Arm, Settings, Variant
from ampwise.bench.equivalence import (
    ALPHA,
    FIRST_LOOK,
    Decision,
    Parity,
    decide,
    least_sd_of,
    seeds_needed,
)
from ampwise.bench.race import FAILURES, why_it_fell_out
from ampwise.errors import TaskError, UsageError
from ampwise.tasks import Task
from ampwise.tasks.checks import endless, higher_is_better
from ampwise.tasks.seeding import seed_all
from ampwise_lint.base.words import counted

CURVE_POINTS = 200

_NOTHING_LEFT = 1e-6
"""Share of its value before training below which a metric counts as 0: float32's own noise."""


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
        Differences below this do not matter: absolute, or relative to float32's value.
    metric
        Name of the metric; None for the first that the task gives.
    budget_s
        Seconds after which no further seed starts.
    deadline
        By the monotonic clock; a seed that is not done by then is dropped.
    """

    steps: int
    max_seeds: int
    margin: float
    metric: str | None = None
    budget_s: float = math.inf
    deadline: float = math.inf

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


class _Curve(TypedDict):
    step: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class _Scales(TypedDict):
    step: list[float]
    scale: list[float]
    skipped: list[float]


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
    losses, loss
        Per precision the statistics of the loss, relative to float32's; and which loss it is.
    resolution
        Smallest difference between two values of the metric that were seen: how fine it is.
    finals
        Per precision (float32 too) the metric after each seed's run.
    curves
        Per precision the loss over training steps: ``step``, ``mean``, ``low`` and ``high`` over
        seeds.
    scales
        Per precision that scales its loss, of the first seed's run: the loss ``scale`` of each
        ``step``, and the steps that were ``skipped``.
    needed
        Per undecided precision the seeds that would decide it.
    errors
        Per precision what ended a run early.
    left_out
        Per precision that was not trained, why.
    out_of_time
        Whether the deadline came before the seeds that would have been trained.
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
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    loss: str = "loss"
    resolution: float = 0.0
    finals: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    curves: dict[str, Annotated[dict[str, list[float]], _Curve]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    scales: dict[str, Annotated[dict[str, list[float]], _Scales]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    needed: dict[str, int] = field(default_factory=dict[str, int])
    errors: dict[str, str] = field(default_factory=dict[str, str])
    out_of_time: bool = False

    def worse(self, name: str) -> bool:
        """Whether an arm's difference points to the worse side."""
        difference = self.arms[name].difference
        return not math.isfinite(difference) or (difference < 0) == self.higher_is_better

    def too_coarse(self, name: str) -> bool:
        """Whether an arm is undecided because the metric shows no difference at all."""
        found = self.arms[name]
        return found.decision == "undecided" and found.sd == 0 and found.p_equivalent > ALPHA

    def loss_says(self, name: str) -> str:
        """That the loss ends beyond the margin where the metric does not; "" if it does not."""
        found = self.losses.get(name)
        hidden = self.arms[name].decision != "different" and "loss" not in self.metric
        if found is None or not hidden or found.decision != "different" or found.difference <= 0:
            return ""
        return f"its {self.loss} ends {_percent(found.difference)[1:]} above fp32's"

    def said(self, name: str) -> str:
        """An arm's difference with its interval, in words."""
        found = self.arms[name]
        write, unit = (_percent, "of fp32's") if self.relative else (_absolute, "absolute")
        low, high = write(found.low), write(found.high)
        return (
            f"{self.metric} {write(found.difference)} [{low}, {high}] {unit}, "
            f"{found.seeds} paired seeds"
        )


def _percent(difference: float) -> str:
    return f"{100 * difference:+.3g}%"


def _absolute(difference: float) -> str:
    return f"{difference:+.3g}"


def run_parity(
    task: Task,
    variants: Sequence[Variant],
    settings: Settings,
    plan: ParityPlan,
    report: ParityReport,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> None:
    """Train under seed after seed until every variant is decided; fills `report` as it goes.

    Parameters
    ----------
    variants
        float32 first.
    report
        Valid after each seed, also when an exception (Ctrl-C) ends the runs.
    progress
        Told the variant, the seed (from 1) and the seeds planned, before each run.

    Raises
    ------
    UsageError
        When the asked metric is not among those the task's `evaluate` gives.
    """
    baseline, *others = variants
    runs: dict[str, list[Run]] = {each.name: [] for each in variants}
    untrained: list[dict[str, float]] = []
    undecided, started = list(others), time.monotonic()
    report.steps, report.margin = plan.steps, plan.margin
    for seed in range(plan.max_seeds):
        # The first look is worth waiting for, up to a point.
        patience = plan.budget_s * (3 if seed < plan.first_look else 1)
        if not undecided or (seed and time.monotonic() - started > patience):
            break
        of_seed: dict[str, Run] = {}
        for variant in [baseline, *undecided]:
            progress(variant.name, seed + 1, plan.max_seeds)
            may_fail = variant is not baseline
            run = _train(variant, settings, seed, plan, untrained, may_fail=may_fail)
            if run is None:
                report.out_of_time = True
                return
            of_seed[variant.name] = run
            if seed == 0 and variant is baseline:
                _choose_metric(task, plan.metric, run.metrics, untrained[0], report)
        for name, run in of_seed.items():
            runs[name].append(run)
        report.seeds = seed + 1
        _fill(task, runs, untrained, plan, report)
        if report.seeds >= plan.first_look:
            undecided = [each for each in undecided if _decision(report, each) == "undecided"]


def _decision(report: ParityReport, variant: Variant) -> Decision:
    return report.arms[variant.name].decision


def _train(
    variant: Variant,
    settings: Settings,
    seed: int,
    plan: ParityPlan,
    untrained: list[dict[str, float]],
    *,
    may_fail: bool,
) -> Run | None:
    """One run; its baseline's metrics before training go to `untrained`, once a seed.

    None where the deadline came first.
    """
    arm = variant.arm(dataclasses.replace(settings, seed=settings.seed + seed))
    if len(untrained) == seed:
        untrained.append(arm.held_out())
    batches, error, total = endless(variant.task), "", plan.steps * settings.accumulate
    rates = [float(group["lr"]) for group in arm.optimizer.param_groups]
    try:
        for index in range(total):
            if time.monotonic() > plan.deadline:
                return None
            _set_rates(arm, rates, min(1.0, 2 * (total - index) / total))
            # Whatever a precision drew at random, the next step starts alike in all of them.
            seed_all((settings.seed + seed) * 1_000_003 + index)
            arm.run(next(batches))
    except FAILURES as failure:
        if not may_fail:
            raise
        error = why_it_fell_out(failure)
    history = arm.step.history
    return Run(
        losses=[record.loss for record in history],
        metrics={} if error else arm.held_out(),
        error=error,
        scales=[record.loss_scale for record in history] if arm.step.loss_scale.enabled else [],
        skipped=[record.step for record in history if record.skipped],
    )


def steps_that_fit(step_s: float, budget_s: float) -> int:
    """Steps of each training run, for a first look within a budget.

    Parameters
    ----------
    step_s
        Seconds that a step of all variants takes, one after the other; 0 if that is not known.
    """
    # Building models and evaluating them takes its share, too.
    fits = 0.6 * budget_s / (FIRST_LOOK * step_s) if step_s else 0.0
    return max(20, min(300, int(fits) // 10 * 10))


def _set_rates(arm: Arm, rates: Sequence[float], factor: float) -> None:
    for group, rate in zip(arm.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def has_quality(task: Task) -> bool:
    """Whether there is anything to compare: metrics, or a loss that training makes smaller.

    What an iteration reports need not be one: the losses of a GAN's two sides rise and fall.
    """
    return task.evaluate is not None or task.loss is not None


def _loss_of(task: Task) -> str:
    """What a task without metrics gives: the loss that it trains on, or reports."""
    return "training loss" if task.iteration is None else "reported loss"


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
    task: Task,
    asked: str | None,
    metrics: Mapping[str, float],
    untrained: Mapping[str, float],
    report: ParityReport,
) -> None:
    """Which metric, and how: a margin of 0.01 means something by itself on a scale of 1 only."""
    check_metric(asked, metrics)
    report.metric = asked or next(iter(metrics), _loss_of(task))
    report.higher_is_better = higher_is_better(task, report.metric)
    values = [each[report.metric] for each in (metrics, untrained) if report.metric in each]
    bounded = all(abs(each) <= 1 for each in values)
    report.relative = not (report.higher_is_better and bounded)
    report.loss = "held-out loss" if "loss" in metrics else _loss_of(task)


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
    others = names[1:]
    report.finals = _finals(runs, report.metric)
    report.resolution = _resolution(report.metric, report.finals, untrained)
    found = _judged(runs, untrained, report.metric, plan, relative=report.relative)
    report.arms = found | decided
    held_out = "loss" in runs[names[0]][-1].metrics
    known = (held_out or task.loss is not None) and all(
        math.isfinite(_final(run, "loss")) for run in runs[names[0]]
    )
    report.losses = _judged(runs, untrained, "loss", plan, relative=True) if known else {}
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
    report.learning, report.why_not = _learning(task, report.finals[names[0]], untrained, report)


def _judged(
    runs: Mapping[str, Sequence[Run]],
    untrained: Sequence[Mapping[str, float]],
    metric: str,
    plan: ParityPlan,
    *,
    relative: bool,
) -> dict[str, Parity]:
    """Statistics of every arm in one metric; before the first look nothing is decided."""
    (baseline, first), *others = runs.items()
    finals = _finals(runs, metric)
    scales = [
        _scale(run, before, metric) if relative else 1.0
        for run, before in zip(first, untrained, strict=True)
    ]
    differences = {
        name: [
            _difference(*pair) for pair in zip(finals[baseline], finals[name], scales, strict=False)
        ]  # a decided arm has fewer
        for name, _ in others
    }
    resolution = _resolution(metric, finals, untrained) / (min(scales) or 1.0)
    least_sd = {
        name: 0.0 if _identical(first, those) else least_sd_of(resolution) for name, those in others
    }
    found = decide(differences, plan.margin, plan.looks, least_sd)
    if len(first) < plan.first_look:
        return {n: dataclasses.replace(p, decision="undecided") for n, p in found.items()}
    return found


def _finals(runs: Mapping[str, Sequence[Run]], metric: str) -> dict[str, list[float]]:
    return {name: [_final(each, metric) for each in those] for name, those in runs.items()}


def _final(run: Run, metric: str) -> float:
    """A run's metric at its end; of one that ended early, or without it, the loss it trained on."""
    if run.error:
        return math.nan
    if metric in run.metrics:
        return run.metrics[metric]
    tail = run.losses[-max(1, len(run.losses) // 10) :]
    return float(np.mean(tail)) if tail else math.nan


def _scale(run: Run, untrained: Mapping[str, float], metric: str) -> float:
    """What a difference is relative to: float32's value, unless training left nothing of it."""
    begun = untrained.get(metric, run.losses[0] if run.losses else 0.0)
    least = _NOTHING_LEFT * abs(begun) if math.isfinite(begun) else 0.0
    return max(abs(_final(run, metric)), least)


def _difference(baseline: float, arm: float, scale: float) -> float:
    if scale == 0:  # float32 began and ended at exactly 0
        return 0.0 if arm == 0 else math.inf
    return (arm - baseline) / scale


def _identical(first: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether an arm trained bit for bit as float32 did: then no metric could tell them apart."""
    return all(a.losses == b.losses for a, b in zip(first, others, strict=False))


def _resolution(
    metric: str, finals: Mapping[str, Sequence[float]], untrained: Sequence[Mapping[str, float]]
) -> float:
    """The smallest step between values that were seen; inf where there was but one value."""
    seen = {each for values in finals.values() for each in values if math.isfinite(each)}
    seen |= {each[metric] for each in untrained if math.isfinite(each.get(metric, math.nan))}
    return min((b - a for a, b in itertools.pairwise(sorted(seen))), default=math.inf)


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
        sign * (after - before) / ((abs(before) if report.relative else 0.0) or 1.0)
        for after, before in zip(finals, reference, strict=True)
    ]
    enough = bool(np.mean(gains) > report.margin)
    if enough and len(gains) > 1 and np.std(gains) > 0:
        error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
        p_not = 1 - student.cdf(len(gains) - 1, float(np.mean(gains)) / error)
        enough = p_not < ALPHA
    if enough:
        return True, ""
    return False, (
        f"the task is not learning: fp32's {metric} after {counted(report.steps, 'step')} is "
        f"{np.mean(finals):.4g}, {said}{_guessed(task, report)}; train longer (--parity-steps) or "
        "mend the task"
    )


def _guessed(task: Task, report: ParityReport) -> str:
    """The direction that the metric's name was taken to have, where the task does not say."""
    if report.metric in task.higher_is_better or not task.evaluate:
        return ""
    direction = "higher" if report.higher_is_better else "lower"
    other = f'Task(higher_is_better={{"{report.metric}": {not report.higher_is_better}}})'
    return f" ({direction} is taken to be better; {other} says otherwise)"


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
