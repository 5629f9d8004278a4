"""What mends a fault: candidates for its cause, each tried on the failing step itself.

A fix is *verified* when the step, replayed with it, ran to its end with every loss and gradient
finite, and stayed close to the reference: a cosine of at least 0.9 between the true gradients, no
weight matrix that trains on noise, and a loss within 5 % of the terms it is the sum of, or
gradients of at least 20 dB. Where the loss is
scaled, the scale may settle first, as it would in training.

The reference is the float64 shadow of the step, run in float32. A reference that is not finite
itself asks only for a clean replay: a fix then changes what is computed, and says so.
The cost is the time of that replay over one without the fix, taking turns, and what forward saves
more, or less, for backward. Where a step takes long, it is the time of one forward over another's.
A step that raises without the fix is over early: then there is nothing to measure the cost against.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampwise.numerics.candidates import Candidate
from ampwise.numerics.gradients import GradientErrors, in_words
from ampwise.numerics.interventions import Scope, as_it_is, on
from ampwise.numerics.result import Fix
from ampwise.numerics.shadow import ShadowRun, shadow
from ampwise.policy import PRESETS
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed

_LOSS_WITHIN = 0.05
_LEAST_COSINE = 0.9
_SOUND_DB = 20.0
_NO_GRADIENT = 1e-9
_ROUNDS = 3
_TIME_LIMIT_S = 1.0
"""Seconds of timing, for each fix, above which the replay that verified it has to do."""
_STEP = 3.0
"""Time of a step, over that of its forward: backward computes two products for each."""


@dataclass(frozen=True)
class Reference:
    """What the step should have given: losses and true gradients in high precision.

    Attributes
    ----------
    terms
        Size of the terms that each loss is the sum of.
    float32
        Whether the step is finite in float32, where it runs there.
    """

    losses: list[float]
    terms: list[float]
    gradients: dict[str, Tensor]
    float32: bool = True

    @cached_property
    def finite(self) -> bool:
        """Whether it can be compared with."""
        return all(map(math.isfinite, self.losses)) and all(map(finite, self.gradients.values()))


def reference(step: Replayable, stash: Stash) -> Reference:
    """Losses and true gradients of a window in float64."""
    # Beside a float32 run: where branches follow the actual values, they follow sound ones.
    run = shadow(step, stash, errors=False, policy=PRESETS["fp32"], scale=1.0)
    if run.replayed.error is None:
        wanted = reference_from(replace(stash, scale=torch.ones(())), run)
        return replace(wanted, float32=run.replayed.clean)
    return reference_from(stash, shadow(step, stash, errors=False))  # 16-bit parameters


def reference_from(stash: Stash, run: ShadowRun) -> Reference:
    """Losses and true gradients of a shadow run that came to its end."""
    gradients = {name: each / float(stash.scale) for name, each in run.gradients.items()}
    return Reference([float(each) for each in run.losses], run.terms, gradients)


def tried(
    step: Replayable,
    stash: Stash,
    found: Sequence[Candidate],
    wanted: Reference | None,
) -> list[Fix]:
    """Each candidate as a fix, tried on the step; the verified first, in the order given.

    Parameters
    ----------
    wanted
        What a fix must stay close to; None to ask only for a clean replay.
    """
    plain = _forward(step, stash, Candidate("", "")) if found else _Forward(0.0, 0, whole=False)
    fixes = [_try(step, stash, each, wanted, plain) for each in found]
    return sorted(fixes, key=lambda fix: not fix.verified)


def complaint(
    step: Replayable, stash: Stash, candidate: Candidate, wanted: Reference, least_db: float
) -> str:
    """Why a step replayed with a candidate is not right; empty if it is.

    Parameters
    ----------
    least_db
        SQNR that the gradients must keep against the reference.
    """
    settled, result = _with_settled_scale(step, stash, candidate, _replayed(step, stash, candidate))
    if wrong := _complaint(stash, settled, result, wanted):
        return wrong
    scale = float(stash.scale) if settled.scale is None else settled.scale
    kept = gradient_errors(result, wanted, scale).sqnr_db
    return "" if kept >= least_db else f"its gradients keep {kept:.0f} dB, of {least_db:g} asked"


def gradient_errors(result: Replayed, wanted: Reference, scale: float) -> GradientErrors:
    """The true gradients of a replay beside those it should have given."""
    return GradientErrors(result.gradients, wanted.gradients, scale)


@dataclass(frozen=True)
class _Forward:
    """What the forwards of a window take: seconds, and bytes saved for backward.

    Attributes
    ----------
    whole
        Whether they came to their end.
    """

    seconds: float
    saved_bytes: int
    whole: bool

    @property
    def is_long(self) -> bool:
        """Whether a step of such forwards is too long to be timed in turns."""
        return self.seconds * _STEP * _ROUNDS > _TIME_LIMIT_S


def _try(
    step: Replayable,
    stash: Stash,
    candidate: Candidate,
    wanted: Reference | None,
    plain: _Forward,
) -> Fix:
    what, how = candidate.what, candidate.how
    if not candidate.tried:
        return Fix(what, how, verified=False, cost="not tried automatically")
    result = _replayed(step, stash, candidate)
    settled, result = _with_settled_scale(step, stash, candidate, result)
    if complaint := _complaint(stash, settled, result, wanted):
        return Fix(what, how, verified=False, cost=f"tried: {complaint}")
    cost, ratio, more = _cost(step, stash, settled, result, plain)
    if settled.scale is not None and settled.scale < float(stash.scale) and not settled.policy:
        cost += f", under a loss scale of {settled.scale:g}"
    return Fix(what, how, verified=True, cost=cost, step_time_ratio=ratio, activation_bytes=more)


def _cost(
    step: Replayable, stash: Stash, candidate: Candidate, result: Replayed, plain: _Forward
) -> tuple[str, float | None, int | None]:
    """What a fix costs, in words, as a ratio of times and in bytes of activations."""
    if plain.whole and plain.is_long:
        ratio = result.forward_s / plain.seconds
        return f"about {ratio:.2f}x the time of forward", ratio, None
    ratio = time_ratio(step, stash, candidate) if plain.whole else None
    if ratio is None:
        return "cost not measured: without it the step raises", None, None
    more = _forward(step, stash, candidate).saved_bytes - plain.saved_bytes
    words = f"{ratio:.2f}x the time of the step, {more / 1e6:+.3g} MB of activations"
    return words, ratio, more


def _forward(step: Replayable, stash: Stash, candidate: Candidate) -> _Forward:
    """The forwards with a candidate: what they take, and keep for backward, parameters aside."""
    own = {each.untyped_storage()._cdata for each in step.parameters().values()}
    kept: dict[int, tuple[Any, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = None if tensor.is_sparse or tensor._is_zerotensor() else tensor.untyped_storage()
        if storage is not None and storage._cdata not in own:
            kept[storage._cdata] = (storage, storage.nbytes())  # alive, so that no address returns
        return tensor

    @contextmanager
    def around() -> Generator[None]:
        with candidate.around(), torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            yield

    result = _replayed(step, stash, replace(candidate, around=around), backward=False)
    saved_bytes = sum(size for _, size in kept.values())
    return _Forward(result.forward_s, saved_bytes, whole=result.error is None)


def _replayed(
    step: Replayable, stash: Stash, candidate: Candidate, *, backward: bool = True
) -> Replayed:
    return step.replay(
        stash,
        around=candidate.around,
        policy=candidate.policy,
        scale=candidate.scale,
        change=candidate.change,
        backward=backward,
    )


def _with_settled_scale(
    step: Replayable, stash: Stash, candidate: Candidate, result: Replayed
) -> tuple[Candidate, Replayed]:
    """The same candidate under the loss scale that training would come to."""
    settles = step.scales_loss and candidate.scale is None
    scale = float(stash.scale)
    while settles and scale > 1 and not result.clean and result.error is None:
        if not all(map(finite, result.losses)):
            break
        scale = max(1.0, scale / 16)
        candidate = replace(candidate, scale=scale)
        result = _replayed(step, stash, candidate)
    return candidate, result


def _complaint(
    stash: Stash, candidate: Candidate, result: Replayed, wanted: Reference | None
) -> str:
    """Why a replay with a fix does not count as mended; empty if it does."""
    if result.error is not None:
        return f"raises {type(result.error).__name__}"
    if not result.clean:
        return "still not finite"
    if wanted is None or not wanted.finite or candidate.change is not None:
        return ""
    errors = gradient_errors(
        result, wanted, float(stash.scale) if candidate.scale is None else candidate.scale
    )
    if errors.sqnr_db < _SOUND_DB:
        for loss, ideal, terms in zip(result.losses, wanted.losses, wanted.terms, strict=True):
            if abs(float(loss) - ideal) > _LOSS_WITHIN * max(terms, 1e-3):
                return f"finite, but the loss is {float(loss):.4g} and should be {ideal:.4g}"
    if errors.norm < _NO_GRADIENT * max(1.0, max(map(abs, wanted.losses), default=0.0)):
        return ""  # zero in exact arithmetic: what is there is rounding
    if errors.cosine < _LEAST_COSINE:
        return f"finite, but its gradients are off (cosine {errors.cosine:.2f})"
    wrong = list(errors.missing())
    if wrong:
        more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
        return f"finite, but most of the gradient of {', '.join(wrong[:2])}{more} is missing"
    noisy = errors.noisy()
    return f"finite, but a fault is left: {in_words(noisy)}" if noisy else ""


def time_ratio(step: Replayable, stash: Stash, candidate: Candidate) -> float | None:
    """Time of a replay with the fix over one without, in turns, medians; None if either raises."""
    # A function mode costs time that the fix in the code would not: give it to both.
    nowhere = on(Scope("", 0), as_it_is)
    plain = replace(candidate, around=nowhere if candidate.function_mode else nullcontext,
                    policy=None, scale=None, change=None)  # fmt: skip
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for fixed in (False, True):
            start = time.perf_counter()
            if _replayed(step, stash, candidate if fixed else plain).error is not None:
                return None
            times[fixed].append(time.perf_counter() - start)
    return statistics.median(times[True]) / statistics.median(times[False])
