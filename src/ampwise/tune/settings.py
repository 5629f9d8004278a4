"""The fastest, or the smallest, way to train a task: precision x levers x islands for speed.

1. precisions in turns with fp32, by successive halving (`turns`); on a CPU each makes its first
   step in a process that can be killed
2. for speed, what is faster in float32 (`islands`), as islands of the best 16-bit policy
3. each lever alone, on the best policy
4. the levers that helped, one on top of the other, the strongest first: one stays if the whole step
   is better with it; then the islands, unless the step is slower without them
5. the result in turns with fp32, its exact peak memory, and the runner-up precision with the levers
6. parity: the result and fp32 train under the same seeds

For speed, better means that the interval of samples a second lies above 1. For memory it means an
exact peak below that without it; a result that is slower than asked gives levers back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ampwise.bench.arm import Settings
from ampwise.bench.parity import (
    ParityPlan,
    ParityReport,
    has_quality,
    run_parity,
    steps_that_fit,
)
from ampwise.bench.trial import limit_from, reference_step, slow, try_first_step
from ampwise.capability import probe
from ampwise.clock import done_at
from ampwise.policy import PRESETS, Policy, candidates
from ampwise.tasks import Task
from ampwise.tasks.checks import first_batch
from ampwise.tasks.levers import BATCH, LEVERS, pulled, times_in
from ampwise.tune import result
from ampwise.tune.islands import faster_in_float32
from ampwise.tune.result import Credit, Measured, Objective, Tuned
from ampwise.tune.setting import PLAIN, Setting
from ampwise.tune.turns import Progress, Turns
from ampwise.tune.verdict import verdict

MARGIN = 0.01
"""Difference in quality that does not matter."""

_BATCHES = (2, 4)
"""Batches that are tried joined into one."""

_SMALLER = 0.01
"""Share of the peak that a lever has to save to be worth its place."""

_MOST_ISLANDS = 3
_SHARES = {"precisions": 0.2, "islands": 0.35, "levers": 0.65, "together": 0.85, "result": 1.0}
"""By when of the budget each stage ends."""

_TOO_LATE = "not enough turns in the time; --budget gives more"

_LEAST = 0.05
"""Share of the budget that each part of a stage gets, also where others took theirs."""


@dataclass(frozen=True)
class SearchConfig:
    """What is asked for.

    Attributes
    ----------
    precisions
        Policies to try beside fp32; None for those the device is good for.
    levers
        Levers to try; None for all.
    budget_s
        Seconds of the search without parity; no further round starts after them.
    least_speed
        For memory: how fast the result has to be, over fp32.
    max_seeds
        Paired seeds for parity, at most; 0 leaves it out.
    parity_budget_s
        Seconds after which no further seed starts.
    """

    objective: Objective
    settings: Settings
    precisions: Sequence[Policy] | None = None
    levers: Sequence[str] | None = None
    budget_s: float = 300.0
    least_speed: float = 1.0
    max_seeds: int = 5
    parity_budget_s: float = 90.0


def search_settings(
    task: Task,
    config: SearchConfig,
    progress: Progress,
    save: Callable[[Tuned], object] = lambda _: None,
) -> Tuned:
    """Look for the setting that the objective asks for; interrupting keeps what is known.

    Parameters
    ----------
    save
        Given what was found so far after each stage.
    """
    found = Tuned(task.name or "task", str(config.settings.device), 0.0)
    found.objective = config.objective
    found.settings = result.Settings(unit=str(task.info.get("samples", "samples")))
    pulled(task, config.levers or ())  # what there is not is said now
    first_batch(task)
    search = _Search(task, config, progress, found.settings)
    try:
        for _ in search.stages():
            save(found)
    except KeyboardInterrupt:
        found.settings.interrupted = True
    search.conclude()
    found.choice = search.best.policy.text
    found.finished = not found.settings.interrupted
    found.verdict = verdict(found)
    return found


class _Search:
    """A search, stage by stage.

    Attributes
    ----------
    best
        The best setting so far.
    """

    def __init__(
        self, task: Task, config: SearchConfig, progress: Progress, found: result.Settings
    ) -> None:
        self._task, self._config, self._progress, self._found = task, config, progress, found
        self._turns = Turns(task, config.settings, progress)
        self._began = time.monotonic()
        self._for_speed = config.objective == "speed"
        self._lowered: Setting | None = None
        self._second: Policy | None = None
        self._path: list[Setting] = []
        self.best = PLAIN

    def stages(self) -> Iterator[None]:
        """Make one stage after the other."""
        islands = [self._islands] if self._for_speed else []
        stages = [self._precisions, *islands, self._levers, self._together]
        for stage in (*stages, self._result, self._parity):
            stage()
            yield

    def _deadline(self, stage: str) -> float:
        """When a stage ends; one that begins late gets a little time all the same."""
        budget_s = self._config.budget_s
        return max(self._began + _SHARES[stage] * budget_s, time.monotonic() + _LEAST * budget_s)

    # -- precisions --------------------------------------------------------------------------------

    def _precisions(self) -> None:
        policies = [each for each in self._asked() if each != PLAIN.policy]
        self._progress.stage("first steps")
        settings = self._that_end([Setting(each) for each in policies])
        self._progress.stage("precisions")
        self._turns.halve(settings, PLAIN, self._deadline("precisions"), at_any_cost=True)
        self._found.precisions = [self._measured(Setting(each), peak=True) for each in policies]
        able = [each for each in settings if each not in self._turns.why]
        ranked = self._faster(able) if self._for_speed else self._smaller(able)
        self.best, *rest = [*ranked, PLAIN] if self._for_speed else ranked
        self._lowered = max((e for e in able if e.policy.autocast), key=self._speed, default=None)
        if self._for_speed and rest and rest[0] != PLAIN:
            self._second = rest[0].policy

    def _asked(self) -> list[Policy]:
        """The precisions to try: those that the device has natively."""
        if self._config.precisions is not None:
            return list(self._config.precisions)
        native, _ = candidates(probe(self._config.settings.device))
        # Which islands pay is looked for, not guessed.
        return [each for each in native if not each.islands] or [PRESETS["bf16"]]

    def _that_end(self, settings: list[Setting]) -> list[Setting]:
        """Those whose first step is not hopeless; on a CPU one may take minutes."""
        if self._config.settings.device.type != "cpu":
            return settings
        batch = first_batch(self._task)
        reference = reference_step(lambda: self._turns.arm(PLAIN), batch)
        for each in settings:
            trial = try_first_step(
                lambda each=each: self._turns.arm(each), batch, limit_from(reference)
            )
            if trial.error or trial.hopeless(reference):
                self._turns.why[each] = trial.error or slow(trial, reference)
        return [each for each in settings if each not in self._turns.why]

    def _faster(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those faster than fp32 for sure, the fastest first."""
        ratios = {each: self._turns.ratio(each, PLAIN) for each in settings}
        sure = {each: ratio.median for each, ratio in ratios.items() if ratio and ratio.low > 1}
        return sorted(sure, key=lambda each: -sure[each])

    def _smaller(self, settings: Sequence[Setting]) -> list[Setting]:
        """fp32 and those not slower than asked, the smallest first."""
        kept = [each for each in settings if self._fast_enough(each)]
        return sorted([PLAIN, *kept], key=lambda each: self._turns.peak(each) or float("inf"))

    def _fast_enough(self, setting: Setting) -> bool:
        ratio = self._turns.ratio(setting, PLAIN)
        return ratio is not None and ratio.median >= self._config.least_speed

    # -- levers ------------------------------------------------------------------------------------

    def _levers(self) -> None:
        base = self.best
        candidates = {each: base.having(each) for each in self._to_try()}
        self._progress.stage("levers, each alone")
        self._found.credits = [Credit(each, base.text) for each in candidates]
        if self._for_speed:
            self._turns.halve(list(candidates.values()), base, self._deadline("levers"))
        for credit in self._found.credits:
            setting = candidates[credit.lever]
            if not self._for_speed:
                self._progress.stage(f"peak memory with {credit.lever}")
                credit.memory_alone = self._saved(setting, base)
            credit.alone = self._turns.ratio(setting, base)
            credit.reason = self._turns.why.get(setting, "")
            if self._for_speed and credit.alone is None and not credit.reason:
                credit.reason = _TOO_LATE

    def _to_try(self) -> list[str]:
        if self._config.levers is not None:
            return list(self._config.levers)
        batches = [f"{BATCH}={each}" for each in _BATCHES] if self._for_speed else []
        return [*self._task.levers, *LEVERS, *batches]

    def _saved(self, setting: Setting, beside: Setting) -> float | None:
        """Share of the peak memory of one that another saves."""
        peak, before = self._turns.peak(setting), self._turns.peak(beside)
        return 1 - peak / before if peak is not None and before else None

    def _together(self) -> None:
        """Levers on top of each other, the strongest first."""
        self._path = [self.best]
        for credit in sorted(self._found.credits, key=self._strength, reverse=True):
            if self._strength(credit) <= 0:
                break
            if self._for_speed and time.monotonic() > self._began + self._config.budget_s:
                credit.reason = _TOO_LATE
                continue
            self._progress.stage(f"{credit.lever} beside the others")
            self._add(credit, self.best.having(credit.lever))

    def _strength(self, credit: Credit) -> float:
        """How much a lever promises; not above 0 where it promises nothing."""
        if not self._for_speed:
            return (credit.memory_alone or 0.0) - _SMALLER
        alone = credit.alone
        return 0.0 if alone is None or alone.high <= 1 else alone.median - 1

    def _add(self, credit: Credit, setting: Setting) -> None:
        """Keep a lever if it is better with it."""
        before = self.best
        if self._for_speed:
            self._turns.halve([setting], before, self._deadline("together"))
            credit.together = self._turns.ratio(setting, before)
            credit.reason = "" if credit.together else _TOO_LATE
            better = credit.together is not None and credit.together.low > 1
        else:
            credit.memory_together = self._saved(setting, before)
            better = (credit.memory_together or 0.0) > _SMALLER
        credit.reason = self._turns.why.get(setting, credit.reason)
        if better:
            self._take(setting)

    def _take(self, setting: Setting) -> None:
        self.best = setting
        self._path.append(setting)

    # -- islands for speed -------------------------------------------------------------------------

    def _islands(self) -> None:
        """Islands of the best 16-bit policy, which may be faster than fp32 with them only."""
        best = self._lowered
        if best is None:
            return
        self._progress.stage("what is faster in float32")
        self._found.islands_searched = True
        self._found.islands = faster_in_float32(self._turns.arm(best), first_batch(self._task))
        for island in self._found.islands[:_MOST_ISLANDS]:
            islands = (*best.policy.islands, *island.pattern.split("+"))
            setting = Setting(replace(best.policy, islands=islands))
            self._turns.halve([setting], best, self._deadline("islands"))
            island.together = self._turns.ratio(setting, best)
            if island.together is not None and island.together.low > 1:
                island.chosen, best = True, setting
        if best is not self._lowered:
            self._turns.halve([best], PLAIN, self._deadline("islands"))
            self._found.precisions.append(self._measured(best, peak=True))
            if self._faster([best]) and self._speed(best) > self._speed(self.best):
                self.best = best

    # -- the result --------------------------------------------------------------------------------

    def _result(self) -> None:
        self._give_islands_back()
        self._progress.stage("the result beside fp32")
        finalists = [self.best]
        if self._second is not None and self.best.levers:
            finalists.append(Setting(self._second, self.best.levers))
        others = [each for each in finalists if each != PLAIN]
        self._turns.halve(others, PLAIN, self._deadline("result"), at_any_cost=True)
        if self._for_speed:
            self.best = next(iter(self._faster(finalists)), PLAIN)
        while not self._for_speed and len(self._path) > 1 and not self._fast_enough(self.best):
            self._path.pop()  # the last one saved the least
            self.best = self._path[-1]
            self._turns.halve([self.best], PLAIN, self._deadline("result"), at_any_cost=True)
        self._found.chosen = self._measured(self.best, peak=True)

    def _give_islands_back(self) -> None:
        """Islands that levers made idle go, as attention's where products do it: nobody is slower.

        Not those that the step is slower without for sure.
        """
        islands = [each for each in self._found.islands if each.chosen]
        if not islands or not self.best.levers or self._lowered is None:
            return
        self._progress.stage("the result without islands")
        without = replace(self.best, policy=self._lowered.policy)
        self._turns.halve([without], self.best, self._deadline("together"))
        ratio = self._turns.ratio(without, self.best)
        if ratio is not None and ratio.high >= 1:
            self.best = without
            for each in islands:
                each.chosen = False

    def _speed(self, setting: Setting) -> float:
        ratio = self._turns.ratio(setting, PLAIN)
        return 1.0 if ratio is None else ratio.median

    def _parity(self) -> None:
        """Training with the result, and in fp32 on the same batches."""
        seeds, found = self._config.max_seeds, self._found
        if not seeds or self.best == PLAIN:
            return
        if not has_quality(self._task):
            found.parity_reason = (
                "the loss that an iteration reports is no measure of quality; give the task "
                "evaluate()"
            )
            return
        self._progress.stage("parity")
        batch = tuple(each for each in self.best.levers if times_in(each) > 1)
        baseline = Setting(PLAIN.policy, batch)
        if baseline == self.best:
            found.parity_reason = "it is fp32 itself, on larger batches"
            return
        pair = [self._turns.variant(each) for each in (baseline, self.best)]
        budget_s = self._config.parity_budget_s
        steps = steps_that_fit(self._pair_s(), budget_s)
        found.parity = ParityReport()
        plan = ParityPlan(steps, seeds, MARGIN, budget_s=budget_s)
        shown = self._progress.seed
        run_parity(self._task, pair, self._config.settings, plan, found.parity, shown)
        if found.parity.arms[self.best.text].decision == "different":
            found.refused, found.chosen, self.best = found.chosen, None, PLAIN

    def _pair_s(self) -> float:
        """Seconds that a step of both takes."""
        batch, device = first_batch(self._task), self._config.settings.device
        arms = [self._turns.arm(each) for each in (PLAIN, self.best)]
        for arm in arms:
            arm.run(batch)
        start = time.perf_counter()
        for arm, _ in itertools.product(arms, range(3)):
            arm.run(batch)
        return (done_at(device) - start) / 3 * self.best.times

    def conclude(self) -> None:
        """Say what was chosen, also of a search that was interrupted."""
        found = self._found
        if found.chosen is None:
            found.chosen = self._measured(self.best, peak=False)
        for credit in found.credits:
            credit.chosen = credit.lever in self.best.levers
        found.train = self.best.options()

    def _measured(self, setting: Setting, *, peak: bool) -> Measured:
        """What is known of a setting."""
        if peak and setting not in self._turns.why:
            self._progress.stage(f"peak memory of {setting.text}")
            size, saved = self._turns.peak(setting), self._saved(setting, PLAIN)
        else:
            size = saved = None
        why = self._turns.why.get(setting, "")
        return Measured(setting.text, self._turns.ratio(setting, PLAIN), size, saved, why)
