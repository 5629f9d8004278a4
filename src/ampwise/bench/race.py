"""The race: all arms resident, one step each a round, in shuffled order, until it is decided."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ampwise.bench.arm import Arm
from ampwise.clock import done_at
from ampwise.errors import (
    MissingExtraError,
    PolicyError,
    RunError,
    SkippedStepsError,
    kind_and_words,
)
from ampwise.stats import Interval, paired_speedup

MIN_ROUNDS = 20
LEAST_PAIRS = 5
"""Below, an interval says nothing about how far the next pair may lie off."""

MAX_WARM_UP = 15
STEADY = 0.1
DECIDED = 0.02
"""Relative half-width of the speedup's interval at which a race ends early."""

TIME_IS_UP = "the time was up (--budget)"
"""Why something was not measured."""

FAILURES = (RuntimeError, RunError, PolicyError, MissingExtraError)
"""What a precision may raise without ending the others: no kernel, out of memory, only skips.

Or that it does not fit the model, or is not installed.
"""

GPU_BLOCK = 10
"""Steps between two device events on a GPU; one sync a block."""


@dataclass
class Race:
    """Times per arm, one a round, in milliseconds; and what happened to arms that fell out."""

    times_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    fell_out: dict[str, str] = field(default_factory=dict[str, str])
    launch_bound: set[str] = field(default_factory=set[str])
    baseline: str = ""
    loading_s: float = 0.0
    planned: int = 0
    started: float = 0.0
    deadline: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds that every arm still in the race completed."""
        running = [times for name, times in self.times_ms.items() if name not in self.fell_out]
        return min(map(len, running), default=0)

    @property
    def left_s(self) -> float:
        """Seconds the race may still take: rounds at the rate so far, or what the budget leaves."""
        now = time.monotonic()
        by_rate = (now - self.started) / max(self.rounds, 1) * (self.planned - self.rounds)
        return max(0.0, min(by_rate, self.deadline - now))


def run_race(
    arms: Sequence[Arm],
    batches: Iterator[Any],
    race: Race,
    *,
    max_rounds: int,
    budget_s: float,
    progress: Callable[[Race], None],
    after_turn: Callable[[str], object] = lambda _: None,
    warm_up: int = MAX_WARM_UP,
) -> None:
    """Fill `race`; what it holds stays valid when an exception (Ctrl-C) ends it early.

    Parameters
    ----------
    arms
        The baseline first.
    batches
        Endless; every arm gets the same batch in a round.
    budget_s
        Seconds after which no further round starts; of these the warm-up takes a quarter at most.
    progress
        Called after each round.
    after_turn
        Called with the arm's name after each of its turns that counts, outside of what is timed.
    warm_up
        Steps of each arm that do not count, at most: until they take equally long.
    """
    running, race.baseline = list(arms), arms[0].name
    begun = time.monotonic()
    _warm_up(running, batches, race, warm_up, begun + budget_s / 4)
    for arm in running:
        race.times_ms[arm.name] = []
    race.planned, race.started = max_rounds, time.monotonic()
    race.deadline = begun + budget_s
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        while race.rounds < max_rounds and time.monotonic() < race.deadline:
            asked = time.monotonic()
            batch = next(batches)
            race.loading_s += time.monotonic() - asked
            for arm in order.sample(running, len(running)):
                if _timed(arm, batch, race):
                    after_turn(arm.name)
                else:
                    running.remove(arm)
            gc.collect(0)
            progress(race)
            if decided(race):
                return
    finally:
        gc.enable()


def speedups(race: Race, baseline: str) -> dict[str, Interval]:
    """Paired speedup over the baseline of every arm that stayed in the race."""
    rounds = race.rounds
    return {
        name: paired_speedup(race.times_ms[baseline][:rounds], times[:rounds])
        for name, times in race.times_ms.items()
        if name != baseline and name not in race.fell_out and rounds
    }


def steady(times: Sequence[float]) -> bool:
    """Whether the last three lie within 10 % of each other."""
    last = times[-3:]
    return len(last) == 3 and max(last) - min(last) <= STEADY * statistics.median(last)


def decided(race: Race) -> bool:
    """Whether every arm's interval is narrow enough; asked every fifth round."""
    if race.rounds < MIN_ROUNDS or race.rounds % 5:
        return False
    found = speedups(race, race.baseline)
    return bool(found) and all(each.half_width <= DECIDED for each in found.values())


def why_it_fell_out(error: BaseException) -> str:
    """`kind_and_words`, and what to do about steps that are not finite."""
    hint = "; ampwise diagnose finds out why" if isinstance(error, SkippedStepsError) else ""
    return kind_and_words(error) + hint


def _warm_up(
    running: list[Arm], batches: Iterator[Any], race: Race, most: int, deadline: float
) -> None:
    """Step until the last three steps of each arm lie within 10 % of each other, or long enough."""
    recent: dict[str, list[float]] = {arm.name: [] for arm in running}
    for _ in range(most):
        batch = next(batches)
        for arm in list(running):
            race.times_ms[arm.name] = recent[arm.name]
            if not _timed(arm, batch, race):
                running.remove(arm)
        if all(steady(recent[arm.name]) for arm in running) or time.monotonic() > deadline:
            return


def _timed(arm: Arm, batch: Any, race: Race) -> bool:
    """One sample of one arm; False when it fell out, with the reason noted."""
    device = arm.step.device
    try:
        elapsed_ms = (
            _gpu_ms(arm, batch, race) if device.type == "cuda" else _wall_ms(arm, batch, device)
        )
    except FAILURES as error:
        if arm.name == race.baseline:
            raise
        race.fell_out[arm.name] = why_it_fell_out(error)
        return False
    race.times_ms[arm.name].append(elapsed_ms)
    return True


def _wall_ms(arm: Arm, batch: Any, device: torch.device) -> float:
    start = time.perf_counter()
    arm.run(batch)
    return (done_at(device) - start) * 1e3


def _gpu_ms(arm: Arm, batch: Any, race: Race) -> float:
    """Milliseconds a step by device events over a block of steps, one sync for the block."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    for _ in range(GPU_BLOCK):
        arm.run(batch)
    end.record()
    end.synchronize()
    wall_ms = (time.perf_counter() - start) * 1e3
    if wall_ms > 1.1 * begin.elapsed_time(end):
        race.launch_bound.add(arm.name)
    return begin.elapsed_time(end) / GPU_BLOCK
