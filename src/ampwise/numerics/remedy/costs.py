"""What a fix costs, measured as `bench` measures: arms that take turns, paired ratios, an interval.

In each round come the step as it is, the same once more (the noise of the machine), and each fix
beside what it has to be compared with. The time of an arm is that of its forwards and backwards;
where they take long, of the forwards alone, and where these do, too, it is not measured. Nor is it
where the step does not read as itself to 5 %: then the ratio says nothing.

A fix that is tried by looking at every call of a line takes time that it would not take in the
code, so it is compared with the step under the same look that changes nothing. A patch is another
source: what it costs is its step beside that of the original, loaded in the same process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampwise.bench.requirements import NOISY
from ampwise.capability import multiplies_float8
from ampwise.clock import done_at
from ampwise.numerics.remedy.candidate import AS_IT_IS, Candidate
from ampwise.numerics.remedy.interventions import InScope
from ampwise.numerics.result import Fix
from ampwise.stats import Interval, paired_speedup
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable, Replayed
from ampwise_lint.base.words import size

_LIMIT_S = 2.0
"""Time that the turns of all fixes of a fault may take."""
_ROUNDS, _LEAST_ROUNDS = 15, 5
_WIDE = 0.25
"""Half width of an interval, relative to its median, above which it says nothing."""

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Cost:
    """What a fix costs, in words, as a ratio of times and in bytes of activations."""

    words: str
    time: Interval | None = None
    activation_bytes: int | None = None

    def of(self, fix: Fix, more: str = "") -> Fix:
        """A fix that costs this; `more` is said of it, too."""
        ratio = self.time
        return replace(
            fix,
            cost=self.words + more,
            step_time_ratio=None if ratio is None else ratio.median,
            step_time_low=None if ratio is None else ratio.low,
            step_time_high=None if ratio is None else ratio.high,
            activation_bytes=self.activation_bytes,
        )


def replayed(
    step: Replayable,
    stash: Stash,
    candidate: Candidate,
    *,
    backward: bool = True,
    until_bad: bool = False,
) -> Replayed:
    """A window replayed with a fix."""
    return step.replay(
        stash,
        around=candidate.around,
        policy=candidate.policy,
        scale=candidate.scale,
        change=candidate.change,
        backward=backward,
        until_bad=until_bad,
    )


@dataclass(frozen=True, eq=False)
class Run:
    """A window as it is replayed: by whose step, and with what change."""

    step: Replayable
    stash: Stash
    candidate: Candidate = AS_IT_IS

    def beside(self) -> Run:
        """What it is compared with: without the change, under the same look where it has one."""
        context = self.candidate.around()
        if not isinstance(context, InScope):
            return replace(self, candidate=AS_IT_IS)
        idle = context.idle(self.step.device.type)
        return replace(self, candidate=Candidate("", "", idle))


Pair = tuple[Run, Run]
"""A run with a change, and one without."""


def costs(step: Replayable, stash: Stash, fixes: Sequence[Candidate]) -> list[Cost]:
    """What each of some fixes costs that are known to mend the step."""
    if step.policy.float8 and not multiplies_float8(step.device):
        return [Cost("cost not measured: float8 is emulated here")] * len(fixes)
    changed = [Run(step, stash, each) for each in fixes]
    return _measured(Run(step, stash), [(each, each.beside()) for each in changed])


def cost_of(original: Run, changed: Run) -> Cost:
    """What a changed source costs beside the original."""
    return _measured(original, [(changed, original)])[0]


def _measured(plain: Run, pairs: Sequence[Pair]) -> list[Cost]:
    if not pairs:
        return []
    start = time.perf_counter()
    without = _Memory.of(plain)
    if not without.whole:
        return [Cost("cost not measured: without it the step raises")] * len(pairs)
    race = _raced(plain, pairs, time.perf_counter() - start)
    if race.raised:
        return [Cost("cost not measured: without it the step raises")] * len(pairs)
    found: list[Cost] = []
    for (changed, _), ratio in zip(pairs, race.ratios, strict=True):
        words, held = race.in_words(ratio)
        more = None
        if race.rounds:
            more = _Memory.of(changed).saved_bytes - without.saved_bytes
            words += f", {'-' if more < 0 else '+'}{size(abs(more))} of activations"
        found.append(Cost(words, held, more))
    return found


def time_ratio(step: Replayable, stash: Stash, candidate: Candidate) -> Interval | None:
    """Time of the step with a fix over that without; None where it cannot be measured."""
    changed = Run(step, stash, candidate)
    race = _raced(Run(step, stash), [(changed, changed.beside())], 0.0)
    return race.ratios[0] if race.rounds and not race.raised else None


@dataclass(frozen=True)
class _Race:
    """Times of a step with fixes over those without."""

    ratios: list[Interval]
    noise: Interval
    rounds: int
    what: str
    forward_s: float
    raised: bool = False

    def in_words(self, ratio: Interval) -> tuple[str, Interval | None]:
        """A ratio in words, and itself where it says something."""
        if not self.rounds:
            return f"time not measured: one forward takes {self.forward_s:.1f} s", None
        if max(self.noise.median, 1 / self.noise.median) > NOISY:
            why = f"too noisy: the step against itself reads {self.noise}"
            return f"time not measured: the machine is {why}", None
        if ratio.half_width > _WIDE:
            return f"time not measured: the machine is too noisy: {ratio}", None
        return f"{ratio} the time of {self.what}", ratio


def _raced(plain: Run, pairs: Sequence[Pair], known_s: float) -> _Race:
    """Let the step and fixes take turns."""
    unknown = Interval(1.0, 1.0, 1.0)
    nothing = _Race([unknown] * len(pairs), unknown, 0, "", known_s)
    if known_s * 3 > _LIMIT_S:  # backward takes about twice as long as forward
        return nothing
    arms = _arms(plain, pairs)
    most_s = _LIMIT_S / (_LEAST_ROUNDS * len(arms))
    forward_s = _time_of(plain, backward=False)
    if forward_s is not None and forward_s > most_s:  # a backward would only take longer
        return replace(nothing, forward_s=forward_s)
    whole_s = _time_of(plain, backward=True)
    if forward_s is None or whole_s is None:
        return replace(nothing, raised=True)
    backward = whole_s <= most_s
    rounds = min(_ROUNDS, int(_LIMIT_S / ((whole_s if backward else forward_s) * len(arms))))
    times = _turns(arms, rounds, backward=backward)
    if times is None:
        return replace(nothing, raised=True)
    without = [times.get(f"without {i}", times["step"]) for i in range(len(pairs))]
    ratios = [paired_speedup(times[f"fix {i}"], each) for i, each in enumerate(without)]
    noise = paired_speedup(times["again"], times["step"])
    return _Race(ratios, noise, rounds, "the step" if backward else "forward", forward_s)


def _arms(plain: Run, pairs: Sequence[Pair]) -> dict[str, Run]:
    """The step, itself again, and each fix with what it is compared with."""
    arms = {"step": plain, "again": plain}
    for index, (changed, without) in enumerate(pairs):
        arms[f"fix {index}"] = changed
        if without.candidate is not AS_IT_IS:  # else it is the step
            arms[f"without {index}"] = without
    return arms


def _turns(
    arms: Mapping[str, Run], rounds: int, *, backward: bool
) -> dict[str, list[float]] | None:
    """Times of each arm, round by round; None if one raises."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    order, draw = list(arms), random.Random(0)
    began = time.perf_counter()
    for made in range(rounds + 1):
        if made > _LEAST_ROUNDS and time.perf_counter() - began > 2 * _LIMIT_S:
            break  # a fix may be slower by far than the step
        draw.shuffle(order)  # caches are warm from the arm before: it must not be the same always
        for name in order:
            taken = _time_of(arms[name], backward=backward)
            if taken is None:
                return None
            times[name].append(taken)
    return {name: each[1:] for name, each in times.items()}  # the first round warms up


def _time_of(run: Run, *, backward: bool) -> float | None:
    return _time_s(run.step, run.stash, run.candidate, backward=backward)


def _time_s(
    step: Replayable, stash: Stash, candidate: Candidate, *, backward: bool
) -> float | None:
    """Time of forwards, and backwards, in seconds; None where it raises."""
    taken = 0.0

    @contextmanager
    def timed() -> Generator[None]:
        nonlocal taken
        with candidate.around():
            start = time.perf_counter()
            yield
            taken = done_at(step.device) - start

    result = replayed(step, stash, replace(candidate, around=timed), backward=backward)
    return taken if result.error is None else None


@dataclass(frozen=True)
class _Memory:
    """What the forwards keep for backward.

    Attributes
    ----------
    whole
        Whether they came to their end, so that there is something to compare with.
    """

    saved_bytes: int
    whole: bool

    @classmethod
    def of(cls, run: Run) -> _Memory:
        """The forwards of a run, parameters aside."""
        own = {each.untyped_storage()._cdata for each in run.step.parameters().values()}
        kept: dict[int, tuple[Any, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            hollow = tensor.is_sparse or tensor._is_zerotensor()
            storage = None if hollow else tensor.untyped_storage()
            if storage is not None and storage._cdata not in own:
                kept[storage._cdata] = (storage, storage.nbytes())  # alive: no address returns
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks

        @contextmanager
        def around() -> Generator[None]:
            with run.candidate.around(), hooks(pack, lambda each: each):
                yield

        observed = replace(run.candidate, around=around)
        result = replayed(run.step, run.stash, observed, backward=False)
        return cls(sum(size for _, size in kept.values()), whole=result.error is None)
