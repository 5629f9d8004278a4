"""The race: in which precision a step is fastest that holds, run on the step itself (``auto``).

Each candidate runs the first micro-batch again and again, forward, backward and guard, in turns
with float32 (`Rerun`), on the very model. Nothing of it stays: parameters, gradients, buffers,
modules' attributes and random state are afterwards as before, and no optimizer is stepped.

    holds     loss and gradients are finite (float16: at some loss scale of at least 1), and the
              gradients' SQNR against float32's is at least `LEAST_SQNR_DB`, or that of float32
              with other random numbers where a step is as random as that
    faster    the interval of its paired speedup over float32 lies above `GAIN`
    chosen    the fastest of those; of two within `ALIKE` the plainer one; float32 if there is none

It takes about `BUDGET_S` seconds; where steps are long, two each of float32 and of the guess.
What it found is kept by model, batch and device; the next run only looks whether that holds.

Several ranks run the same turns, each on its own part of the batch. A candidate that does not hold
on one is out on all, and a turn takes as long as on the slowest.

The optimizer's part is the same in all precisions and is left out, so a whole step gains less.
Compiled models run eagerly here: every candidate would have to be compiled first. `loss_fn` is
called some hundred times, so what it does beside computing a loss is done as often.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampwise import capability
from ampwise.capability import cache
from ampwise.clock import done_at
from ampwise.data.move import leaves
from ampwise.distributed.host_group import HostGroup, RankError, beside
from ampwise.errors import kind_and_words
from ampwise.policy import PRESETS, Policy, Resolution, candidates
from ampwise.policy.resolution import GUESSED
from ampwise.sqnr import decibels
from ampwise.stats import Interval, paired_speedup
from ampwise.step import gradients as grads
from ampwise.step.compiled import eager
from ampwise.step.loss_scale import INIT_SCALE
from ampwise.step.precision import Calls
from ampwise.step.recorder import RandomState, finite
from ampwise.step.replay import Replay, Rerun, let_go, undisturbed
from ampwise.step.train_step import TrainStep
from ampwise.step.window import Weight
from ampwise_lint.base.words import counted

GAIN = 1.03
"""Speedup over float32 that a candidate's whole interval must exceed."""

ALIKE = 0.02
"""Relative difference up to which of two candidates the plainer one is taken."""

LEAST_SQNR_DB = 10.0
"""Of gradients against float32's: the error is then a third of the gradient's length."""

BUDGET_S = 3.0
MIN_ROUNDS, MAX_ROUNDS = 8, 40

_BLOCK = 5
"""Runs in a turn on an accelerator, between two syncs."""

_BACKOFF = 16.0
"""By which a loss scale is lowered that float16 overflows at."""

_FUNCTIONS = ("scaled_dot_product_attention",)
"""Those that candidates may keep in float32, if the step calls them."""

_DRAWS_DB = 3.0
"""By which two pairs of draws may differ in how far apart their gradients are."""

_BASELINE = "fp32"
_OVERFLOWS = "its gradients are not finite"

Speedups = Mapping[str, Interval]
"""Over float32, by candidate, the plainest first."""


def race(
    step: TrainStep, loss_fn: Callable[[Any, Any], Any], batch: Any, weight: Weight | None
) -> Resolution:
    """What ``auto`` becomes for a step; its guess, with the reason, where that cannot be told.

    Parameters
    ----------
    step
        Before its first micro-batch; all its ranks call this.
    loss_fn, batch, weight
        Of that.
    """
    guess, host = step.resolution, beside(step.group)
    assert guess is not None
    if not Replay(step).can_replay:
        return _not_raced(guess, "FSDP2 has set the dtype of its weights already")
    run = _Run(loss_fn, batch, weight, RandomState.now(step.device))
    supported = capability.probe(step.device)
    names = host.first(lambda: [each.text for each in candidates(supported)[0]])
    key = {**cache.key(supported.hardware), "step": _fingerprint(step, run, names)}
    known = host.first(lambda: _speedups(cache.recall("race", supported.hardware, key), names))
    try:
        with _without_a_trace(step):
            field = _Field(step, run, host)
            if known:
                return _resolution(guess, known, field, "raced before on a step like this")
            began = time.monotonic()
            found = field.race(list(map(Policy.parse, names)), guess.policy)
            took = host.first(lambda: f"{time.monotonic() - began:.1f} s")  # ranks say the same
            how = f"raced on this step in {took}, {field.words}"
            resolution = _resolution(guess, found, field, how)
    except (_BaselineError, RankError) as failure:
        return _not_raced(guess, str(failure))
    if host.rank == 0:
        figures = {name: [each.median, each.low, each.high] for name, each in found.items()}
        cache.keep("race", supported.hardware, key, {"speedups": figures})
    return resolution


# -- the runs --------------------------------------------------------------------------------------


class _BaselineError(Exception):
    """float32 itself could not run, so there is nothing to compare with."""


class _UnfitError(Exception):
    """Why a candidate does not hold."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What is run: the first micro-batch, and the random state it begins with."""

    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    weight: Weight | None
    random_state: RandomState


class _Arm:
    """The micro-batch in one precision."""

    def __init__(self, step: TrainStep, policy: Policy, run: _Run, scale: float) -> None:
        self._run = run
        self._rerun = Rerun(step, policy, scale)

    def gradients(self, *, anew: bool = False) -> dict[str, Tensor]:
        """True gradients of a run, `anew` with other random numbers.

        Raises
        ------
        _UnfitError
            When loss or gradients are not finite.
        """
        rerun = self._rerun
        if not anew:
            self._run.random_state.restore(rerun.device)
        loss = self._micro_batch()
        found = {name: _dense(each) for name, each in rerun.gradients().items()}
        rerun.discard()
        if not finite(loss):
            raise _UnfitError("its loss is not finite")
        if not grads.wide_norm(list(found.values()), rerun.device).isfinite():
            raise _UnfitError(_OVERFLOWS)
        return found

    def turn_ms(self) -> float:
        """Milliseconds of a run."""
        device = self._rerun.device
        length = 1 if device.type == "cpu" else _BLOCK
        self._run.random_state.restore(device)
        began = done_at(device)
        for _ in range(length):
            self._micro_batch()
            self._rerun.gradient_norms()
            self._rerun.discard()
        return (done_at(device) - began) * 1e3 / length

    def close(self) -> None:
        """Let go of the model, whatever was open."""
        self._rerun.close()

    def _micro_batch(self) -> Tensor:
        returned = self._rerun.micro_batch(self._run.loss_fn, self._run.batch, self._run.weight)
        return returned[0] if isinstance(returned, tuple) else returned


class _Field:
    """The arms of a race, the same on all ranks.

    Attributes
    ----------
    out
        Candidates that do not hold, with the reason.
    words
        How long they raced.
    """

    def __init__(self, step: TrainStep, run: _Run, host: HostGroup) -> None:
        self.out: dict[str, str] = {}
        self.words = ""
        self._step, self._run, self._host = step, run, host
        self._arms: dict[str, _Arm] = {}
        self._wanted: dict[str, Tensor] = {}
        self._called: set[str] = set()
        self._least_db = LEAST_SQNR_DB

    # -- who holds ---------------------------------------------------------------------------------

    def admit(self, policy: Policy) -> bool:
        """Whether a candidate takes part: it does if it holds on all ranks."""
        if not self._arms:
            self._begin()
        if policy.text in self._arms:
            return True
        scale = INIT_SCALE if policy.loss_scaling else 1.0
        while True:
            verdicts = self._host.all(lambda: self._why_not(policy, scale))  # noqa: B023
            why = next(filter(None, verdicts), "")
            if not why:
                return True
            if arm := self._arms.pop(policy.text, None):  # another rank's did not hold
                arm.close()
            if why != _OVERFLOWS or scale <= 1:
                self.out[policy.text] = why
                return False
            scale = max(scale / _BACKOFF, 1.0)

    def _begin(self) -> None:
        """Run float32, which the others are compared with.

        Raises
        ------
        _BaselineError
            On all ranks, when it fails on any.
        """
        failures = self._host.all(self._why_no_baseline)
        if why := next(filter(None, failures), ""):
            raise _BaselineError(f"fp32 failed: {why}")

    def _why_no_baseline(self) -> str:
        arm = _Arm(self._step, PRESETS[_BASELINE], self._run, 1.0)
        try:
            with Calls(_FUNCTIONS) as calls:
                self._wanted = arm.gradients()
            self._called.update(each for each in _FUNCTIONS if each not in calls.unseen)
            if self._draws():
                again = _sqnr_db(arm.gradients(anew=True), self._wanted)
                self._least_db = min(LEAST_SQNR_DB, again - _DRAWS_DB)
        except Exception as error:  # noqa: BLE001 - the step will raise it, in its own words
            arm.close()
            return _told(error)
        self._arms[_BASELINE] = arm
        return ""

    def _draws(self) -> bool:
        """Whether the run has drawn random numbers: another precision may draw others."""
        before, now = self._run.random_state, RandomState.now(self._step.device, host=False)
        pairs = ((before.torch, now.torch), (before.device, now.device))
        return any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)

    def _why_not(self, policy: Policy, scale: float) -> str:
        """Why a candidate does not hold on this rank; empty if it does."""
        arm = None
        try:
            arm = _Arm(self._step, policy, self._run, scale)
            _demand(_sqnr_db(arm.gradients(), self._wanted), self._least_db)
        except Exception as error:  # noqa: BLE001 - whatever it is, this precision does not hold
            if arm is not None:
                arm.close()
            return _told(error)
        self._arms[policy.text] = arm
        return ""

    # -- who is faster -----------------------------------------------------------------------------

    def race(self, policies: Sequence[Policy], guess: Policy) -> Speedups:
        """Speedups of those that hold, by turns; few take part where a step takes long."""
        began = time.monotonic()
        self._begin()
        policies = [each for each in policies if self._called.issuperset(each.island_functions)]
        if self._host.first(lambda: self._is_slow(began, len(policies))):
            policies = [each for each in policies if each == guess] or policies[:1]
        for policy in policies:
            self.admit(policy)
        self._wanted = {}  # room for what the turns need
        times: dict[str, list[float]] = {name: [] for name in self._arms}
        deadline, order = time.monotonic() + BUDGET_S, random.Random(0)
        while self._host.first(lambda: not _is_over(times, deadline)):
            turns = order.sample(list(times), len(times))
            self._host.agree(lambda: _round(self._arms, turns, times))  # noqa: B023
        rounds = len(times[_BASELINE])
        self.words = counted(rounds, "round")
        return _over_baseline(_slowest(self._host.all(lambda: times)))

    def _is_slow(self, began: float, candidates: int) -> bool:
        """Whether a round of all would take longer than there is time."""
        if time.monotonic() - began < BUDGET_S / 3:
            return False
        step_s = self._arms[_BASELINE].turn_ms() / 1e3  # warm, now
        return step_s * (1 + candidates) > BUDGET_S


def _round(arms: Mapping[str, _Arm], turns: Sequence[str], times: dict[str, list[float]]) -> None:
    for name in turns:
        times[name].append(arms[name].turn_ms())


def _is_over(times: Mapping[str, Sequence[float]], deadline: float) -> bool:
    """Whether every interval is narrow, or clearly says no; or the time is up."""
    rounds = len(times[_BASELINE])
    if not rounds:
        return len(times) == 1
    if rounds >= MAX_ROUNDS or time.monotonic() > deadline:
        return True
    found = _over_baseline(times).values()
    return rounds >= MIN_ROUNDS and all(e.half_width <= ALIKE or e.high < 1 for e in found)


def _slowest(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Each turn's time on the slowest rank."""
    return {
        name: [max(turn) for turn in zip(*(each[name] for each in of_ranks), strict=True)]
        for name in of_ranks[0]
    }


def _over_baseline(times: Mapping[str, Sequence[float]]) -> Speedups:
    own = times[_BASELINE]
    return {name: paired_speedup(own, each) for name, each in times.items() if name != _BASELINE}


# -- what comes of it ------------------------------------------------------------------------------


def fastest(speedups: Speedups) -> str:
    """Who is to be used: the fastest one that gains, or one like it that is plainer, or fp32."""
    gains = {name: each.median for name, each in speedups.items() if each.low > GAIN}
    best = max(gains.values(), default=0.0)
    return next((name for name, each in gains.items() if each >= best * (1 - ALIKE)), _BASELINE)


def _resolution(guess: Resolution, speedups: Speedups, field: _Field, how: str) -> Resolution:
    """The decision, once the winner is known to hold on this very batch."""
    left = {name: each for name, each in speedups.items() if name not in field.out}
    while (winner := fastest(left)) != _BASELINE and not field.admit(Policy.parse(winner)):
        del left[winner]
    figures = ", ".join(f"{name} {each}" for name, each in left.items())
    said = f"{how}: {figures} of fp32 in forward, backward and guard" if left else how
    if winner == _BASELINE and left:
        said += f"; none gains {GAIN - 1:.0%}"
    out = [f"{name} is out: {why}" for name, why in field.out.items()]
    reasons = (*_of_device(guess), said, *out)
    return replace(guess, policy=Policy.parse(winner), reasons=reasons, guess=False)


def _not_raced(guess: Resolution, why: str) -> Resolution:
    return replace(guess, reasons=(*_of_device(guess), f"not raced: {why}", *_of_guess(guess)))


def _of_device(guess: Resolution) -> tuple[str, ...]:
    """What a guess says about the device; it comes first."""
    return guess.reasons[: guess.reasons.index(GUESSED)] if GUESSED in guess.reasons else ()


def _of_guess(guess: Resolution) -> tuple[str, ...]:
    """What speaks for it."""
    return tuple(
        each for each in guess.reasons if each != GUESSED and each not in _of_device(guess)
    )


# -- what is kept ----------------------------------------------------------------------------------


def _fingerprint(step: TrainStep, run: _Run, names: Sequence[str]) -> str:
    """What the times of a run depend on, beside the machine."""
    modules = step.whole.named_modules()
    facts = {
        "modules": [(name, type(each).__qualname__) for name, each in modules],
        "parameters": [
            (name, str(each.dtype), tuple(each.shape), each.requires_grad)
            for name, each in step.named_tensors().items()
        ],
        "batch": [(name, str(e.dtype), tuple(e.shape)) for name, e in leaves(run.batch)],
        "loss": getattr(run.loss_fn, "__qualname__", type(run.loss_fn).__qualname__),
        "candidates": list(names),
        "ranks": step.ranks,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _speedups(stored: Mapping[str, Any], names: Sequence[str]) -> Speedups:
    """What was kept of a race; empty where there is nothing that can be trusted."""
    try:
        figures: dict[str, Any] = stored.get("speedups", {})
        found = {name: Interval(*map(float, each)) for name, each in figures.items()}
    except (TypeError, ValueError, AttributeError):
        return {}
    sound = all(0 < e.low <= e.median <= e.high < math.inf for e in found.values())
    return found if sound and found.keys() <= set(names) else {}


def _demand(quality_db: float, least_db: float) -> None:
    if not quality_db >= least_db:
        raise _UnfitError(
            f"its gradients are at {quality_db:.0f} dB SQNR of float32's, "
            f"{least_db:.0f} dB expected"
        )


# -- small parts -----------------------------------------------------------------------------------


@contextmanager
def _without_a_trace(step: TrainStep) -> Generator[None]:
    """Context: what runs inside leaves nothing behind, and warns of nothing that the step will."""
    held = step.named_tensors().values()
    before = [(each, each._version, each.detach().clone()) for each in held]
    with warnings.catch_warnings(), eager(step.models), undisturbed(Replay(step)), step.apart():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, version, copy in before:
                    if parameter._version != version:  # as an embedding's with max_norm
                        parameter.copy_(copy)


def _told(error: Exception) -> str:
    """An error in words; its frames, and the memory they hold, are let go."""
    let_go(error)
    return str(error) if isinstance(error, _UnfitError) else kind_and_words(error)


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _sqnr_db(found: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """How far gradients are from others, in dB; these are used up."""
    if found.keys() != wanted.keys():
        return -math.inf
    device = next(iter(wanted.values())).device
    noise = [found[name].sub_(each) for name, each in wanted.items()]
    signal, error = (
        float(grads.wide_norm(list(each), device)) for each in (wanted.values(), noise)
    )
    return decibels(signal, error)
