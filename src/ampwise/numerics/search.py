"""The smallest set of modules that must stay in float32, and the fastest policy that holds.

A policy *holds* on a step when the step, replayed under it, is finite, close to the float64
reference, and its gradients keep a stated SQNR. One that does not is given islands: starting from
all modules in which something is computed, delta debugging (Zeller and Hildebrandt, 2002) removes
what is not needed, the least suspicious first, until no module can be left out. Islands of one
parent are merged where one switch of precision is measured to cost less than several. What was
found is then held against other batches, and against training on, which may show the next fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.result import BenchReport
from ampwise.bench.run import BenchConfig, run_bench
from ampwise.data import to_device
from ampwise.document import Document
from ampwise.errors import UsageError
from ampwise.numerics import fix
from ampwise.numerics import interventions as change
from ampwise.numerics.candidates import Candidate
from ampwise.numerics.costs import time_ratio
from ampwise.numerics.diagnose import DiagnoseConfig, explore
from ampwise.numerics.examine import Silent
from ampwise.numerics.result import Diagnosis
from ampwise.numerics.shadow import shadow
from ampwise.numerics.trace import watch
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay
from ampwise.step.replayable import Replayable
from ampwise.tasks import Task
from ampwise.tasks.checks import endless
from ampwise_lint.base.words import counted

LEAST_DB = 20.0
"""SQNR that gradients must keep, by default: an error of a tenth of their norm."""

_OTHER_BATCHES = 3
_FAULTS = 4
"""Faults, one after the other, that islands are looked for."""


@dataclass
class Tried:
    """One precision, and what it took to make it hold.

    Attributes
    ----------
    precision, policy
        As asked, and with the islands it needs; None when no islands make it hold.
    islands
        Modules to keep in float32.
    reason
        Why it holds or not.
    replays
        Steps replayed in the search.
    gradient_db
        SQNR of its gradients against float64, the least over the validated batches.
    speedup
        Measured against fp32 in turns; None where it was not raced.
    """

    precision: str
    policy: str | None = None
    islands: list[str] = field(default_factory=list[str])
    reason: str = ""
    replays: int = 0
    gradient_db: float | None = None
    speedup: float | None = None


@dataclass
class Tuned(Document):
    """What `tune` found.

    Attributes
    ----------
    choice
        The fastest policy that holds, as text; ``fp32`` when none is faster.
    verdict
        What to do, in sentences.
    bench
        Speed, memory and parity of the policies that hold, against fp32.
    finished
        Whether everything asked for was tried; what an interruption leaves behind was not.
    """

    schema = "ampwise.tune/1"
    non_finite_words = True

    task: str
    device: str
    least_db: float
    tried: list[Tried] = field(default_factory=list[Tried])
    choice: str = "fp32"
    verdict: list[str] = field(default_factory=list[str])
    bench: BenchReport | None = None
    finished: bool = False


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
        arm, diagnosis, stash = explore(
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


class Search:
    """Looks for islands under which some windows are right.

    Attributes
    ----------
    replays
        Steps replayed so far.
    complaint
        What was wrong the last time.
    """

    def __init__(self, step: Replayable, windows: Sequence[Stash], least_db: float) -> None:
        self.step = step
        self.replays = 0
        self.complaint = ""
        self._least_db = least_db
        self.windows = [each for each in windows if step.replay(each).error is None]
        self._wanted = [fix.reference(step, each) for each in self.windows]
        self._modules = {
            name: module for model in step.models for name, module in model.named_modules() if name
        }

    def smallest(self) -> list[str] | None:
        """Names of the modules to keep, none if none is needed; None if all of them do not help."""
        if self.holds([]):
            return []
        ranked = self._ranked()
        if not self.holds(ranked):
            return None
        return self._merged(minimal(ranked, self.holds))

    def holds(self, names: Sequence[str]) -> bool:
        """Whether every window is right with these modules in float32."""
        candidate = self._candidate(names)
        for window, wanted in zip(self.windows, self._wanted, strict=True):
            self.replays += 1
            self.complaint = fix.complaint(self.step, window, candidate, wanted, self._least_db)
            if self.complaint:
                return False
        return True

    def quality_db(self) -> float:
        """Least SQNR of the gradients over the windows, as the step is."""
        return min(
            fix.gradient_errors(self.step.replay(window), wanted, float(window.scale)).sqnr_db
            for window, wanted in zip(self.windows, self._wanted, strict=True)
        )

    def _candidate(self, names: Sequence[str]) -> Candidate:
        modules = [self._modules[name] for name in names]
        return Candidate("", "", partial(change.in_float32, modules, self.step.device.type))

    def _ranked(self) -> list[str]:
        """Modules in which something is computed, the most suspicious first."""
        blame: dict[str, float] = {}
        for error in shadow(self.step, self.windows[0]).errors:
            name = error.place.module
            blame[name] = min(blame.get(name, float("inf")), error.local_db)
        trace = watch(self.step, self.windows[0])
        for root in trace.roots.values():
            blame[root.place.module] = float("-inf")
        return [
            name for name in sorted(blame, key=lambda each: blame[each]) if name in self._modules
        ]

    def _merged(self, names: list[str]) -> list[str]:
        """Siblings under one parent as one island, where that is no slower."""
        for parent, children in _families(names):
            together = [parent, *(each for each in names if each not in children)]
            if parent in self._modules and self.holds(together):
                window = self.windows[0]
                one = time_ratio(self.step, window, self._candidate([parent]))
                several = time_ratio(self.step, window, self._candidate(children))
                if one is not None and several is not None and one.median <= several.median:
                    names = together
        return names


def _families(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    for parent in parents:
        children = [name for name in names if name.startswith(f"{parent}.")]
        if len(children) > 1:
            yield parent, children


def minimal(names: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """A 1-minimal part of `names` that still holds, by delta debugging.

    Parameters
    ----------
    names
        All of them together hold.
    """
    kept, parts = list(names), 2
    while len(kept) > 1:
        size = max(1, len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        for chunk in chunks:
            if len(chunk) < len(kept) and holds(chunk):
                kept, parts = chunk, 2
                break
        else:
            for chunk in reversed(chunks):  # the least suspicious go first
                rest = [each for each in kept if each not in chunk]
                if rest and holds(rest):
                    kept, parts = rest, max(parts - 1, 2)
                    break
            else:
                if size == 1:
                    return kept
                parts = min(len(kept), parts * 2)
    return kept


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
