"""The smallest set of modules that must stay in float32, and the fastest policy that holds.

A policy *holds* on a step when the step, replayed under it, is finite, close to the float64
reference, and its gradients keep a stated SQNR. One that does not is given islands (`search`). What
was found is then held against other batches, and against training on, which may show the next
fault. Of the policies that hold, the fastest in a race is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.config import BenchConfig
from ampwise.bench.result import BenchReport
from ampwise.bench.run import run_bench
from ampwise.data import to_device
from ampwise.errors import UsageError
from ampwise.numerics.diagnose import DiagnoseConfig, explore
from ampwise.numerics.progress import Silent
from ampwise.numerics.result import Diagnosis
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay
from ampwise.tasks import Task
from ampwise.tasks.checks import endless
from ampwise.tune.result import Tried, Tuned
from ampwise.tune.search import Search
from ampwise_lint.base.words import counted

LEAST_DB = 20.0
"""SQNR that gradients must keep, by default: an error of a tenth of their norm."""

_OTHER_BATCHES = 3
_FAULTS = 4
"""Faults, one after the other, that islands are looked for."""


@dataclass(frozen=True)
class TuneConfig:
    """What is asked for.

    Attributes
    ----------
    precisions
        Policies to make hold.
    bench
        How the race and parity of those that hold are run; None leaves them out.
    """

    precisions: Sequence[Policy]
    settings: Settings
    steps: int = 20
    budget_s: float = 60.0
    least_db: float = LEAST_DB
    bench: BenchConfig | None = None


class Progress(Protocol):
    """Who wants to know how far a search is."""

    def stage(self, what: str) -> None:
        """Something begins."""

    def round(self, race: Any) -> None:
        """A round of the race ended."""

    def seed(self, name: str, seed: int, planned: int) -> None:
        """A precision starts to train under a seed."""


def tune(
    task: Task,
    config: TuneConfig,
    progress: Progress,
    save: Callable[[Tuned], object] = lambda _: None,
) -> Tuned:
    """Make precisions hold with as few islands as possible, and choose the fastest.

    Parameters
    ----------
    save
        Given what was found so far after each precision: a search may take long.

    Raises
    ------
    UsageError
        For a precision in which everything is float32 already.
    """
    for policy in config.precisions:
        if not policy.autocast:
            raise UsageError(
                f"precisions: everything in {policy.text} is float32 already; expected bf16 or fp16"
            )
    found = Tuned(task.name or "task", str(config.settings.device), config.least_db)
    for policy in config.precisions:
        progress.stage(f"{policy.text}: looking for what it needs")
        found.tried.append(make_hold(task, policy, config))
        save(found)
    holding = [each for each in found.tried if each.policy is not None]
    if config.bench is not None and holding:
        policies = [Policy.parse(each.policy) for each in holding if each.policy]
        found.bench = run_bench(task, replace(config.bench, precisions=policies), progress)
        _choose(found, holding, found.bench)
    found.finished = found.bench is None or not found.bench.ended
    found.verdict = _verdict(found)
    return found


def make_hold(task: Task, policy: Policy, config: TuneConfig) -> Tried:
    """Islands under which a policy trains without a fault for the given steps."""
    tried = Tried(policy.text)
    for _ in range(_FAULTS):
        arm, diagnosis, stash, _ = explore(
            task,
            DiagnoseConfig(policy, config.settings, config.steps, config.budget_s),
            Silent(),
        )
        if diagnosis.status == "fault" and _fails_in_float32(arm, stash):
            tried.reason = (
                f"{_cause(diagnosis)}: float32 itself fails on this step, so no set of modules in "
                "float32 mends it; ampwise diagnose says what may"
            )
            return tried
        search = Search(Replay(arm.step), _windows(arm, task, stash), config.least_db)
        needed = search.smallest()
        tried.replays += search.replays
        if needed is None:
            tried.reason = _why_not(diagnosis, search)
            return tried
        if not needed:
            tried.policy, tried.islands = policy.text, list(policy.islands)
            tried.gradient_db = search.quality_db()
            tried.reason = (
                f"holds over {counted(arm.step.steps, 'step')} and "
                f"{counted(len(search.windows), 'batch', 'batches')}"
            )
            return tried
        policy = replace(policy, islands=(*policy.islands, *needed))
    tried.reason = f"still fails with {', '.join(policy.islands)} in float32"
    return tried


def _windows(arm: Arm, task: Task, stash: Stash) -> list[Stash]:
    """The step in question, and the same model on other batches."""
    batches, step = endless(task), Replay(arm.step)
    others = (to_device(next(batches), arm.step.device) for _ in range(_OTHER_BATCHES))
    return [stash, *(step.rehearsal(arm.iteration.again, [each]) for each in others)]


def _fails_in_float32(arm: Arm, stash: Stash) -> bool:
    again = Replay(arm.step).replay(stash, policy=PRESETS["fp32"], scale=1.0)
    return again.error is None and not again.clean


def _cause(diagnosis: Diagnosis) -> str:
    origin = diagnosis.origin
    where = f" at line {origin.line}" if origin is not None and origin.line else ""
    return f"{diagnosis.cause}{where}"


def _why_not(diagnosis: Diagnosis, search: Search) -> str:
    if diagnosis.status == "fault":
        return (
            f"{_cause(diagnosis)}: no set of modules in float32 mends it "
            f"({search.complaint}); ampwise diagnose says what does"
        )
    return f"with every module in float32: {search.complaint}"


def _choose(found: Tuned, holding: Sequence[Tried], report: BenchReport) -> None:
    """The fastest of those that hold, unless parity says it trains differently."""
    best = 1.0
    for each in holding:
        result = next((p for p in report.precisions if p.name == each.policy), None)
        if result is None or result.speedup is None:
            continue
        each.speedup = result.speedup.median
        parity = None if report.parity is None else report.parity.arms.get(each.policy or "")
        different = parity is not None and parity.decision == "different"
        if result.speedup.low > best and not different:
            best, found.choice = result.speedup.median, each.policy or found.choice


def _verdict(found: Tuned) -> list[str]:
    sentences: list[str] = []
    if found.bench is None or found.bench.ended:
        holding = [each.policy for each in found.tried if each.policy]
        sentences.append(
            f"These hold: {', '.join(holding)}." if holding else "None of the precisions holds."
        )
        if found.bench is not None:
            sentences.append("Which is the fastest is not known: the race was interrupted.")
    elif found.choice == "fp32":
        sentences.append("Keep fp32: no precision that holds is faster here.")
    else:
        sentences.append(f"Use --precision {found.choice}, or resolve('{found.choice}').")
    for each in found.tried:
        if each.policy is None:
            sentences.append(f"{each.precision} does not hold: {each.reason}.")
        elif each.islands:
            sentences.append(f"{each.precision} holds as {each.policy}.")
    return sentences
