"""What mends a fault: candidates for its cause, each tried on the failing step itself.

A fix is *verified* when the step, replayed with it, ran to its end with every loss and gradient
finite, and stayed close to the reference: a cosine of at least 0.9 between the true gradients, none
of them missing, no weight matrix that trains on noise, and a loss within 5 % of the terms it is the
sum of, or gradients of at least 20 dB. Where the loss is scaled, the scale may settle first, as it
would in training.

The reference is the float64 shadow of the step, run in float32; where a fix changes the batch, that
of the changed one. A reference that is not finite itself asks only for a clean replay: a fix then
changes what is computed, and says so. No bound is absolute: a gradient of norm 1e-19 is as good as
any, and has to be there. It is taken for a zero in exact arithmetic only where it is small beside
the loss *and* float32 does not confirm it: then what is there is the rounding of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import kind_and_words
from ampwise.numerics.candidates import Candidate
from ampwise.numerics.costs import costs, replayed
from ampwise.numerics.gradients import GradientErrors, in_words
from ampwise.numerics.result import Fix
from ampwise.numerics.shadow import ShadowRun, shadow
from ampwise.numerics.values import which_loss
from ampwise.policy import PRESETS
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed
from ampwise_lint.base.words import power

_LOSS_WITHIN = 0.05
_LEAST_COSINE = 0.9
_SOUND_DB = 20.0
_NO_GRADIENT = 1e-9
"""Norm of the gradient, beside the loss, below which it may be zero in exact arithmetic."""
_CONFIRMED_DB = 10.0
"""SQNR of float32's gradient above which it is there."""


@dataclass(frozen=True)
class Reference:
    """What the step should have given: losses and true gradients in high precision.

    Attributes
    ----------
    terms
        Size of the terms that each loss is the sum of.
    float32
        Whether the step is finite in float32, where it runs there.
    confirmed_db
        SQNR of the gradient that the step has in float32.
    within
        By how much float32 itself misses each loss.
    """

    losses: list[float]
    terms: list[float]
    gradients: dict[str, Tensor]
    float32: bool = True
    confirmed_db: float = -math.inf
    within: list[float] = field(default_factory=list[float])

    @cached_property
    def finite(self) -> bool:
        """Whether it can be compared with."""
        return all(map(math.isfinite, self.losses)) and all(map(finite, self.gradients.values()))

    def is_zero(self, norm: float) -> bool:
        """Whether gradients of this norm, the reference's own, are zero but for rounding."""
        if norm < _NO_GRADIENT * max(self.terms, default=0.0):
            return self.confirmed_db < _CONFIRMED_DB
        return norm == 0


def reference(step: Replayable, stash: Stash) -> Reference:
    """Losses and true gradients of a window in float64."""
    # Beside a float32 run: where branches follow the actual values, they follow sound ones.
    run = shadow(step, stash, errors=False, policy=PRESETS["fp32"], scale=1.0)
    if run.replayed.error is None:
        wanted = reference_from(replace(stash, scale=torch.ones(())), run)
        pairs = zip(run.replayed.losses, wanted.losses, strict=True)
        return replace(
            wanted,
            float32=run.replayed.clean,
            confirmed_db=gradient_errors(run.replayed, wanted, 1.0).sqnr_db,
            within=[_missed(float(loss), ideal) for loss, ideal in pairs],
        )
    return reference_from(stash, shadow(step, stash, errors=False))  # 16-bit parameters


def _missed(loss: float, ideal: float) -> float:
    """By how much float32 misses a loss; 0 where it has none that could excuse anything."""
    return abs(loss - ideal) if math.isfinite(loss) else 0.0


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
    fixes: list[Fix] = []
    held: dict[int, Candidate] = {}
    for each in found:
        if each.otherwise and held:
            continue
        if not each.tried:
            fixes.append(Fix(each.what, each.how, verified=False, cost="not tried automatically"))
            continue
        settled, wrong = _try(step, stash, each, wanted)
        if not each.effective():
            continue
        if not wrong:
            held[len(fixes)] = settled
        fixes.append(Fix(each.what, each.how, verified=not wrong, cost=wrong))
    measured = costs(step, stash, list(held.values()))
    for (index, settled), cost in zip(held.items(), measured, strict=True):
        ratio = cost.time
        fixes[index] = replace(
            fixes[index],
            cost=cost.words + _lowered(stash, settled),
            step_time_ratio=None if ratio is None else ratio.median,
            step_time_low=None if ratio is None else ratio.low,
            step_time_high=None if ratio is None else ratio.high,
            activation_bytes=cost.activation_bytes,
        )
    return sorted(fixes, key=lambda fix: not fix.verified)


def _lowered(stash: Stash, settled: Candidate) -> str:
    """That the loss scale had to settle, where it had."""
    if settled.scale is None or settled.policy or settled.scale >= float(stash.scale):
        return ""
    return f", under a loss scale of {power(settled.scale)}"


def complaint(
    step: Replayable, stash: Stash, candidate: Candidate, wanted: Reference, least_db: float
) -> str:
    """Why a step replayed with a candidate is not right; empty if it is.

    Parameters
    ----------
    least_db
        SQNR that the gradients must keep against the reference.
    """
    settled, result = _with_settled_scale(step, stash, candidate, replayed(step, stash, candidate))
    if wrong := _complaint(stash, settled, result, wanted):
        return wrong
    scale = float(stash.scale) if settled.scale is None else settled.scale
    kept = gradient_errors(result, wanted, scale).sqnr_db
    return "" if kept >= least_db else f"its gradients keep {kept:.0f} dB, of {least_db:g} asked"


def gradient_errors(result: Replayed, wanted: Reference, scale: float) -> GradientErrors:
    """The true gradients of a replay beside those it should have given."""
    return GradientErrors(result.gradients, wanted.gradients, scale)


def _try(
    step: Replayable, stash: Stash, candidate: Candidate, wanted: Reference | None
) -> tuple[Candidate, str]:
    """A candidate under the scale that it needs, and why it does not count; empty if it does."""
    if candidate.change is not None and wanted is not None:
        wanted = _reference_of_changed(step, stash, candidate.change)
    settled, result = _with_settled_scale(step, stash, candidate, replayed(step, stash, candidate))
    if result.error is not None:
        said, plain = kind_and_words(result.error), step.replay(stash).error
        same = plain is not None and kind_and_words(plain) == said
        return settled, f"tried: still raises {said}" if same else f"could not be tried: {said}"
    wrong = _complaint(stash, settled, result, wanted)
    return settled, f"tried: {wrong}" if wrong else ""


def _reference_of_changed(
    step: Replayable, stash: Stash, change: Callable[[Any], Any]
) -> Reference | None:
    """What a step on other batches should give; None where that is not known."""
    batches = [replace(each, batch=change(each.batch)) for each in stash.micro_batches]
    wanted = reference(step, replace(stash, micro_batches=batches))
    if len(wanted.losses) == len(batches) or stash.before:  # an iteration may have any number
        return wanted
    return None


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
        result = replayed(step, stash, candidate)
    return candidate, result


def _complaint(
    stash: Stash, candidate: Candidate, result: Replayed, wanted: Reference | None
) -> str:
    """Why a replay with a fix does not count as mended; empty if it does."""
    if result.error is not None:
        return f"raises {kind_and_words(result.error)}"
    if not result.clean:
        return "still not finite"
    if wanted is None or not wanted.finite:
        return ""
    errors = gradient_errors(
        result, wanted, float(stash.scale) if candidate.scale is None else candidate.scale
    )
    if errors.sqnr_db < _SOUND_DB and (wrong := _wrong_loss(result, wanted)):
        return wrong
    if wanted.is_zero(errors.norm):
        return ""
    wrong = list(errors.missing())
    if wrong:
        more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
        return f"finite, but most of the gradient of {', '.join(wrong[:2])}{more} is missing"
    if errors.cosine < _LEAST_COSINE:
        return f"finite, but its gradients are off (cosine {errors.cosine:.2f})"
    noisy = errors.noisy()
    return f"finite, but a fault is left: {in_words(noisy)}" if noisy else ""


def _wrong_loss(result: Replayed, wanted: Reference) -> str:
    """How a loss differs from what it should be; empty where none does."""
    within = wanted.within or [0.0] * len(wanted.losses)
    known = zip(result.losses, wanted.losses, wanted.terms, within, strict=True)
    for index, (loss, ideal, terms, missed) in enumerate(known):
        if abs(float(loss) - ideal) > max(_LOSS_WITHIN * terms, missed):
            which = which_loss(index, len(wanted.losses))
            return f"finite, but {which} is {float(loss):.4g} and should be {ideal:.4g}"
    return ""
