"""What else makes a run faster or smaller, one at a time, and never credited to a precision.

Each lever (`ampwise.tasks.levers`) is measured against the same task in the same precision without
it: the speed in a race of its own, the peak memory by itself. A lever that does not fit the task is
left out; one that fails says why. Beside them, the batch is re-fit: how far it can grow until the
peak memory is float32's again, and what that does for the rate.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.memory import peak_bytes
from ampwise.bench.race import FAILURES, TIME_IS_UP, Race, run_race, speedups
from ampwise.clock import done_at
from ampwise.data.move import joined
from ampwise.errors import LeverError, kind_and_words
from ampwise.policy import Policy
from ampwise.stats import Interval, paired_speedup
from ampwise.tasks import Task
from ampwise.tasks.checks import build, samples_in
from ampwise.tasks.levers import COMPILE, LEVERS, pulled

_PLAIN = "as it is"
_ROUNDS = 40
_LARGEST = 64
_PADDED_LAYERS = 3
_PADDED_ROUNDS = 45


@dataclass
class LeverResult:
    """One lever, against the same precision without it.

    Attributes
    ----------
    speedup
        Times as fast as without it.
    memory_reduction
        Share of the peak that it saves.
    reason
        Why it was not measured.
    """

    name: str
    precision: str
    speedup: Interval | None = None
    memory_reduction: float | None = None
    reason: str = ""


@dataclass
class Refit:
    """The larger batch that the freed memory allows.

    Attributes
    ----------
    times
        How many of the task's batches fit into one.
    samples_per_s_ratio
        Rate with it over the rate with the task's own batch, in the same precision.
    peak_memory_bytes, limit_bytes
        Its peak, and float32's with the task's batch.
    """

    precision: str
    times: int
    samples: int
    samples_per_s_ratio: Interval | None
    peak_memory_bytes: int
    limit_bytes: int


@dataclass
class Levers:
    """All of them."""

    results: list[LeverResult] = field(default_factory=list[LeverResult])
    refit: Refit | None = None


def measure_levers(
    task: Task,
    policy: Policy,
    settings: Settings,
    batches: Sequence[Any],
    found: Levers,
    *,
    compiled: bool,
    budget_s: float,
    deadline: float = math.inf,
    progress: Callable[[str], None],
) -> None:
    """Measure every lever that applies; fills `found` as it goes.

    Parameters
    ----------
    batches
        A few batches of the task.
    compiled
        Whether to try `torch.compile`, which takes a while.
    budget_s
        Seconds for each race.
    deadline
        By the monotonic clock; after it no lever's turn begins.
    """

    def plain() -> Arm:
        return _named(Arm(task, policy, settings), _PLAIN)

    found.results += _padding(plain(), batches[0])
    before = peak_bytes(plain, batches, settings.device)
    for name, variant in _fitting(task, settings, compiled=compiled).items():

        def make(variant: Task = variant) -> Arm:
            return Arm(variant, policy, settings)

        result = LeverResult(name, policy.text)
        found.results.append(result)
        if time.monotonic() > deadline:
            result.reason = TIME_IS_UP
            continue
        progress(name)
        try:
            after = peak_bytes(make, batches, settings.device)
            seconds = min(budget_s, deadline - time.monotonic())
            result.speedup = _speed(plain(), _named(make(), name), _cycle(batches), seconds)
            result.memory_reduction = 1 - after / before
        except (*FAILURES, TypeError, ValueError) as error:
            result.reason = kind_and_words(error)


def refit(
    task: Task,
    policy: Policy,
    settings: Settings,
    batch: Any,
    limit_bytes: int,
    budget_s: float,
    deadline: float = math.inf,
) -> Refit | None:
    """The largest multiple of the task's batch whose peak stays below `limit_bytes`, by bisection.

    After the deadline (of the monotonic clock) it is the largest that was tried. None where batches
    cannot be joined, or not even two of them fit.
    """

    def peak(times: int) -> int:
        together = joined([batch] * times)
        return peak_bytes(lambda: Arm(task, policy, settings), [together] * 2, settings.device)

    def in_time() -> bool:
        return time.monotonic() < deadline

    try:
        best, size = 1, 0
        step = 2
        while in_time() and step <= _LARGEST and (needed := peak(step)) <= limit_bytes:
            best, size, step = step, needed, step * 2
        low, high = best, min(step, _LARGEST + 1)
        # Between the last that fits and the first that does not.
        while in_time() and high - low > 1:
            middle = (low + high) // 2
            if (needed := peak(middle)) <= limit_bytes:
                low, best, size = middle, middle, needed
            else:
                high = middle
    except (*FAILURES, TypeError):
        return None
    if best == 1:
        return None
    race = _speed(
        _named(Arm(task, policy, settings), _PLAIN),
        Joined(task, policy, settings, best),
        _cycle([batch]),
        min(budget_s, deadline - time.monotonic()),
    )
    rate = None if race is None else Interval(*(each * best for each in dataclasses.astuple(race)))
    return Refit(
        policy.text, best, samples_in(task, joined([batch] * best)), rate, size, limit_bytes
    )


class Joined(Arm):
    """Runs each batch it is given several times at once, as one."""

    def __init__(self, task: Task, policy: Policy, settings: Settings, times: int) -> None:
        super().__init__(task, policy, settings)
        self.name, self._times = f"{policy.text} batch={times}", times

    def run(self, batch: Any) -> None:
        """A whole step on it."""
        super().run(joined([batch] * self._times))


def _fitting(task: Task, settings: Settings, *, compiled: bool) -> dict[str, Task]:
    """The task with each lever that fits it, by name."""
    found: dict[str, Task] = {}
    for name in (*LEVERS, *task.levers):
        if name == COMPILE and not compiled:
            continue
        try:
            variant = pulled(task, [name])
            build(variant, settings.device, settings.seed)
        except LeverError:
            continue
        found[name] = variant
    return found


def _padding(arm: Arm, batch: Any) -> list[LeverResult]:
    """Layers whose width is no multiple of 8: their product as it is, and padded to one.

    Only the product itself is measured, on random data of the shapes seen in one forward.
    """
    seen: dict[str, tuple[int, int, int]] = {}

    def note(name: str, layer: nn.Linear) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].numel() // layer.in_features
            seen[name] = (rows, layer.in_features, layer.out_features)

        return hook

    hooks = [
        layer.register_forward_pre_hook(note(name, layer))
        for name, layer in arm.model.named_modules()
        if isinstance(layer, nn.Linear) and (layer.in_features % 8 or layer.out_features % 8)
    ]
    if not hooks:
        return []
    arm.run(batch)
    for each in hooks:
        each.remove()
    by_work = sorted(seen, key=lambda name: -seen[name][0] * seen[name][1] * seen[name][2])
    return [_padded(name, *seen[name], arm) for name in by_work[:_PADDED_LAYERS]]


def _padded(name: str, rows: int, ins: int, outs: int, arm: Arm) -> LeverResult:
    wide_in, wide_out = (-(-each // 8) * 8 for each in (ins, outs))
    dtype = getattr(torch, arm.step.policy.compute_dtype)
    device = arm.step.device

    def product(k: int, n: int) -> Callable[[], Tensor]:
        x = torch.randn(rows, k, device=device).to(dtype)
        weight = torch.randn(n, k, device=device).to(dtype)
        return lambda: nn.functional.linear(x, weight)

    times: list[list[float]] = [[], []]
    runs = [product(ins, outs), product(wide_in, wide_out)]
    for _ in range(_PADDED_ROUNDS):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(done_at(device) - start)
    what = f"{name} padded from {ins}x{outs} to {wide_in}x{wide_out} (that product alone)"
    return LeverResult(what, arm.step.policy.text, paired_speedup(*(each[5:] for each in times)))


def _speed(plain: Arm, other: Arm, batches: Iterator[Any], budget_s: float) -> Interval | None:
    race = Race()
    run_race(
        [plain, other],
        batches,
        race,
        max_rounds=_ROUNDS,
        budget_s=budget_s,
        progress=lambda race: None,  # noqa: ARG005
    )
    if other.name in race.fell_out:
        raise RuntimeError(race.fell_out[other.name])
    return speedups(race, plain.name).get(other.name)


def _named(arm: Arm, name: str) -> Arm:
    arm.name = name
    return arm


def _cycle(batches: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from batches
