"""What else makes a run faster or smaller, one at a time, and never credited to a precision.

Each lever is measured against the same task in the same precision without it: the speed in a race
of its own, the peak memory by itself. A lever that does not apply is left out; one that fails says
why. Beside them, the batch is re-fit: how far it can grow until the peak memory is float32's again,
and what that does for the rate.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.memory import peak_bytes
from ampwise.bench.race import FAILURES, Race, run_race, speedups
from ampwise.clock import done_at
from ampwise.data import leaves
from ampwise.data.move import changed, joined
from ampwise.errors import kind_and_words
from ampwise.policy import Policy
from ampwise.stats import Interval, paired_speedup
from ampwise.step.modules import in_form
from ampwise.tasks import Task
from ampwise.tasks.checks import samples_in

_FUSED = (Adam, AdamW, SGD, Adagrad)
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
    """

    def plain() -> Arm:
        return _named(Arm(task, policy, settings), _PLAIN)

    found.results += _padding(plain(), batches[0])
    before = peak_bytes(plain, batches, settings.device)
    for name, make in _levers(task, policy, settings, batches[0], compiled=compiled).items():
        progress(name)
        result = LeverResult(name, policy.text)
        found.results.append(result)
        try:
            after = peak_bytes(make, batches, settings.device)
            result.speedup = _speed(plain(), _named(make(), name), _cycle(batches), budget_s)
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
) -> Refit | None:
    """The largest multiple of the task's batch whose peak stays below `limit_bytes`, by bisection.

    None where batches cannot be joined, or not even two of them fit.
    """

    def peak(times: int) -> int:
        together = joined([batch] * times)
        return peak_bytes(lambda: Arm(task, policy, settings), [together] * 2, settings.device)

    try:
        best, size = 1, 0
        step = 2
        while step <= _LARGEST and (needed := peak(step)) <= limit_bytes:
            best, size, step = step, needed, step * 2
        low, high = best, min(step, _LARGEST + 1)
        while high - low > 1:  # between the last that fits and the first that does not
            middle = (low + high) // 2
            if (needed := peak(middle)) <= limit_bytes:
                low, best, size = middle, middle, needed
            else:
                high = middle
    except (*FAILURES, TypeError):
        return None
    if best == 1:
        return None
    large = joined([batch] * best)
    race = _speed(
        _named(Arm(task, policy, settings), _PLAIN),
        _Fixed(task, policy, settings, large),
        _cycle([batch]),
        budget_s,
    )
    rate = None if race is None else Interval(*(each * best for each in dataclasses.astuple(race)))
    return Refit(policy.text, best, samples_in(task, large), rate, size, limit_bytes)


class _Fixed(Arm):
    """Runs a batch of its own, whatever it is given."""

    def __init__(self, task: Task, policy: Policy, settings: Settings, batch: Any) -> None:
        super().__init__(task, policy, settings)
        self.name, self._batch = "larger batch", batch

    def run(self, batch: Any) -> None:  # noqa: ARG002
        super().run(self._batch)


class _ChannelsLast(Arm):
    """Images and weights with the channels innermost."""

    def __init__(self, task: Task, policy: Policy, settings: Settings) -> None:
        super().__init__(task, policy, settings)
        self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def run(self, batch: Any) -> None:
        super().run(changed(batch, _innermost))


class _Compiled(Arm):
    """The model through `torch.compile`."""

    def prepared(self, model: nn.Module) -> nn.Module:
        """Wrapped: `Module.compile` does nothing for PyTorch's own classes (`Sequential`)."""
        return torch.compile(model)  # pyright: ignore[reportReturnType]


def _levers(
    task: Task, policy: Policy, settings: Settings, batch: Any, *, compiled: bool
) -> dict[str, Callable[[], Arm]]:
    """Those that apply to the task, by name."""
    found: dict[str, Callable[[], Arm]] = {}
    probe = Arm(task, policy, settings)
    if any(map(_could_be_fused, probe.step.optimizers)):
        fused = dataclasses.replace(task, optimizer=_fused(task))
        found["fused optimizer"] = lambda: Arm(fused, policy, settings)
    images = any(tensor.dim() == 4 for _, tensor in leaves(batch))
    if images and any(isinstance(each, nn.Conv2d) for each in probe.model.modules()):
        found["channels_last"] = lambda: _ChannelsLast(task, policy, settings)
    for name, variant in task.levers.items():
        found[name] = lambda variant=variant: Arm(variant(), policy, settings)
    if compiled:
        found["torch.compile"] = lambda: _Compiled(task, policy, settings)
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


def _could_be_fused(optimizer: Optimizer) -> bool:
    return type(optimizer) in _FUSED and not any(each["fused"] for each in optimizer.param_groups)


def _fused(task: Task) -> Callable[[Any], Any]:
    """The task's optimizer, or several, with the same settings, fused."""

    def fused(plain: Optimizer) -> Optimizer:
        if not _could_be_fused(plain):
            return plain
        switched = {"fused": True, "foreach": None}
        groups = [{**group, **switched} for group in plain.param_groups]
        kind: Any = type(plain)
        accepted = inspect.signature(
            kind
        ).parameters  # defaults hold more than the constructor takes
        settings = {k: v for k, v in {**plain.defaults, **switched}.items() if k in accepted}
        return kind(groups, **settings)

    def make(model: Any) -> Any:
        assert task.optimizer is not None  # the default one is fused
        return in_form(task.optimizer(model), fused)

    return make


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


def _innermost(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dim() == 4:
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf
