"""Settings in turns: paired ratios beside one of them, and more turns for the better half.

Successive halving (Jamieson and Talwalkar, 2016): every setting gets a few turns, the better half
twice as many more, until one is left. All arms of a round are in memory together, as in a bench.
A ratio is that of samples a second, so that settings with larger batches compare.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ampwise.bench.arm import Arm, Settings, Variant
from ampwise.bench.levers import Joined
from ampwise.bench.memory import peak_bytes
from ampwise.bench.race import FAILURES, LEAST_PAIRS, MAX_WARM_UP, Race, run_race, why_it_fell_out
from ampwise.errors import LeverError
from ampwise.stats import Interval, paired_speedup
from ampwise.tasks import Task
from ampwise.tasks.checks import endless, trained_on
from ampwise.tasks.levers import pulled
from ampwise.tune.setting import Setting

_FIRST_ROUNDS, _LAST_ROUNDS = 6, 48
_MEMORY_STEPS = 3
_ONE_ROUND_S = 1.0
"""What a race gets at least: a round begun is finished, however long it takes."""


class Progress(Protocol):
    """Who wants to know how far a search is."""

    def stage(self, what: str) -> None:
        """Something begins."""

    def round(self, race: Race) -> None:
        """A round of a race ended."""

    def seed(self, name: str, seed: int, planned: int) -> None:
        """A setting starts to train under a seed."""


@dataclass
class _Times:
    """Times of a setting and of the one beside it, in the same rounds."""

    beside: list[float] = field(default_factory=list[float])
    own: list[float] = field(default_factory=list[float])


@dataclass
class Turns:
    """Makes arms of settings, and measures them.

    Attributes
    ----------
    why
        Settings that could not be measured, with the reason.
    """

    task: Task
    settings: Settings
    progress: Progress
    why: dict[Setting, str] = field(default_factory=dict[Setting, str])
    _variants: dict[Setting, Variant] = field(default_factory=dict[Setting, Variant])
    _times: dict[tuple[Setting, Setting], _Times] = field(
        default_factory=dict[tuple[Setting, Setting], _Times]
    )
    _peaks: dict[Setting, int] = field(default_factory=dict[Setting, int])

    def variant(self, setting: Setting) -> Variant:
        """The task with the levers pulled: the same one each time, which shares compiled code."""
        if setting not in self._variants:
            task = pulled(self.task, setting.levers)
            self._variants[setting] = Variant(setting.text, task, setting.policy)
        return self._variants[setting]

    def arm(self, setting: Setting) -> Arm:
        """A fresh arm that takes the task's own batches."""
        variant = self.variant(setting.own_batch)
        if setting.times == 1:
            return variant.arm(self.settings)
        made = Joined(variant.task, setting.policy, self.settings, setting.times)
        made.name = setting.text
        return made

    def peak(self, setting: Setting) -> int | None:
        """Peak of whole steps in bytes; None, with the reason noted, where they fail."""
        if setting not in self._peaks:
            batches = list(itertools.islice(trained_on(self.task.batches), _MEMORY_STEPS))
            try:
                self._peaks[setting] = peak_bytes(
                    lambda: self.arm(setting), batches, self.settings.device
                )
            except (*FAILURES, LeverError) as error:
                self.why[setting] = _in_words(error)
        return self._peaks.get(setting)

    def ratio(self, setting: Setting, beside: Setting) -> Interval | None:
        """Samples a second over those of another setting; None after too few turns."""
        times = self._times.get((setting, beside))
        if times is None or len(times.own) < LEAST_PAIRS:
            return None
        found, factor = paired_speedup(times.beside, times.own), setting.times / beside.times
        return Interval(*(each * factor for each in dataclasses.astuple(found)))

    def halve(
        self,
        others: Sequence[Setting],
        beside: Setting,
        deadline: float,
        *,
        at_any_cost: bool = False,
    ) -> None:
        """Race settings beside another; what it found stays known when it is interrupted.

        Parameters
        ----------
        deadline
            By the monotonic clock; after it no round starts, but the first ones where they are to
            be had `at_any_cost`.
        """
        running = [arm for each in others if (arm := self._built(each)) is not None]
        if not running:
            return
        by_name = {each.text: each for each in others}
        base, rounds, warm_up = self.arm(beside), _FIRST_ROUNDS, MAX_WARM_UP
        while running and rounds <= _LAST_ROUNDS:
            race = Race()
            left_s = max(deadline - time.monotonic(), _ONE_ROUND_S)
            try:
                with warnings.catch_warnings():
                    # A lever may make an island idle; what it gains by then is measured.
                    warnings.filterwarnings("ignore", "islands: the first step never called")
                    run_race(
                        [base, *running],
                        endless(self.task),
                        race,
                        max_rounds=rounds,
                        budget_s=math.inf if at_any_cost else left_s,
                        progress=self.progress.round,
                        warm_up=warm_up,
                    )
            finally:
                self._note(race, by_name, beside)
            if time.monotonic() > deadline:
                return
            running = self._better_half(running, by_name, beside)
            rounds, warm_up, at_any_cost = 2 * rounds, 1, False

    def _built(self, setting: Setting) -> Arm | None:
        try:
            return self.arm(setting)
        except (*FAILURES, LeverError) as error:
            self.why[setting] = _in_words(error)
            return None

    def _note(self, race: Race, by_name: dict[str, Setting], beside: Setting) -> None:
        for name, reason in race.fell_out.items():
            self.why[by_name[name]] = reason
        if not race.started:
            return  # what it has are the times of the warm-up
        rounds = race.rounds
        for name, times in race.times_ms.items():
            if name in by_name and name not in race.fell_out:
                kept = self._times.setdefault((by_name[name], beside), _Times())
                kept.own += times[:rounds]
                kept.beside += race.times_ms[race.baseline][:rounds]

    def _better_half(
        self, running: Sequence[Arm], by_name: dict[str, Setting], beside: Setting
    ) -> list[Arm]:
        ranked = [
            (ratio.median, place)
            for place, arm in enumerate(running)
            if (ratio := self.ratio(by_name[arm.name], beside)) is not None
            and by_name[arm.name] not in self.why
        ]
        ranked.sort(reverse=True)
        return [running[place] for _, place in ranked[: (len(ranked) + 1) // 2]]


def _in_words(error: BaseException) -> str:
    return error.why if isinstance(error, LeverError) else why_it_fell_out(error)
