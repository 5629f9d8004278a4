"""What mends a fault: candidates for its cause, each tried on the failing step itself.

A fix is *verified* when the step, replayed with it, ran to its end with every loss, gradient and
buffer finite, and stayed close to the reference: a cosine of at least 0.9 between the true
gradients, none of them missing, no weight matrix that trains on noise, and a loss within 5 % of the
terms it is the sum of, or gradients of at least 20 dB. Where the loss is scaled, the scale may
settle first, as it would in training.

The reference (`observe.reference`) is the float64 shadow of the step; where a fix changes the
batch, that of the changed one. A reference that is not finite itself asks only for a clean replay:
a fix then changes what is computed, and says so. A step that is as close without a fix, and only
less exact than it could be, has to be clearly nearer with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampwise.errors import kind_and_words
from ampwise.numerics.observe.gradient_errors import in_words
from ampwise.numerics.observe.reference import Reference, gradient_errors, reference
from ampwise.numerics.observe.values import which_loss
from ampwise.numerics.remedy.candidate import AS_IT_IS, Candidate
from ampwise.numerics.remedy.costs import costs, replayed
from ampwise.numerics.result import Fix
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed, lower_scales
from ampwise_lint.base.words import power

_LOSS_WITHIN = 0.05
_LEAST_COSINE = 0.9
_SOUND_DB = 20.0

NEARER_DB = 6.0
"""What a fix has to gain where the step holds without it."""
_NEARER_LOSS = 0.5
"""Or what it may leave of the error of the loss."""


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
    held: dict[int, _Tried] = {}
    unmended = None if wanted is None else _unmended(step, stash, wanted)
    for each in found:
        if each.otherwise and held:
            continue
        if not each.tried:
            fixes.append(Fix(each.what, each.how, verified=False, cost="not tried automatically"))
            continue
        made = _try(step, stash, each, wanted, unmended)
        if not each.effective():
            continue
        if not made.wrong:
            held[len(fixes)] = made
        fixes.append(Fix(each.what, each.how, verified=not made.wrong, cost=made.wrong))
    measured = costs(step, stash, [made.settled for made in held.values()])
    for (index, made), cost in zip(held.items(), measured, strict=True):
        fixes[index] = cost.of(fixes[index], _lowered(stash, made.settled) + made.weak)
    return sorted(fixes, key=lambda fix: not fix.verified)


@dataclass(frozen=True)
class _Tried:
    """A candidate that was tried.

    Attributes
    ----------
    settled
        The same under the loss scale that it needs.
    wrong
        Why it does not count; empty if it does.
    weak
        That a weight matrix is far from exact yet, if one is.
    """

    settled: Candidate
    wrong: str
    weak: str = ""


def _lowered(stash: Stash, settled: Candidate) -> str:
    """That the loss scale had to settle, where it had."""
    if settled.scale is None or settled.policy or settled.scale >= float(stash.scale):
        return ""
    return f", under a loss scale of {power(settled.scale)}"


@dataclass(frozen=True)
class Judgement:
    """A step replayed with a candidate, held against its reference.

    Attributes
    ----------
    complaint
        Why it is not right; empty if it is.
    sqnr_db
        Of its gradients, under a loss scale that has settled; None where they are exact, not
        finite, zero but for rounding, or not known.
    scale
        That loss scale.
    weakest
        The parameter whose gradient this is the SQNR of, where it is that of one.
    weak
        Parameters whose gradient is wrong, though the whole does not show it.
    """

    complaint: str
    sqnr_db: float | None = None
    scale: float = 1.0
    weakest: str = ""
    weak: Sequence[str] = ()


def judged(
    step: Replayable,
    stash: Stash,
    candidate: Candidate,
    wanted: Reference,
    least_db: float = -math.inf,
    weak: Collection[str] = (),
) -> Judgement:
    """Replay a step with a candidate: is it right?

    Parameters
    ----------
    weak
        Parameters whose gradient was wrong (`Judgement.weak`): the SQNR is the least of theirs.
    least_db
        SQNR that the gradients must keep against the reference.
    """
    settled, result = _settled(step, stash, candidate)
    scale = float(stash.scale) if settled.scale is None else settled.scale
    wrong = _complaint(stash, settled, result, wanted)
    if wrong and not (result.clean and wanted.finite):
        return Judgement(wrong, scale=scale)
    errors = gradient_errors(result, wanted, scale)
    kept, weakest = errors.least(weak)
    if not wrong and not kept >= least_db:  # NaN is not
        return Judgement(f"its gradients keep {kept:.0f} dB, of {least_db:g} asked", scale=scale)
    known = wanted.finite and math.isfinite(kept) and not wanted.is_zero(errors.norm)
    hidden = errors.hidden() if wanted.finite else ()
    return Judgement(wrong, kept if known else None, scale, weakest if known else "", hidden)


def kept_db(step: Replayable, stash: Stash, wanted: Reference, weak: Collection[str] = ()) -> float:
    """SQNR of a step's gradients, right or not: -inf if not finite, NaN if they should be 0.

    Parameters
    ----------
    weak
        As for `judged`.
    """
    settled, result = _settled(step, stash, AS_IT_IS)
    if result.error is not None or not result.clean:
        return -math.inf
    errors = gradient_errors(result, wanted, settled.scale or float(stash.scale))
    return math.nan if wanted.is_zero(errors.norm) else errors.least(weak)[0]


def _try(
    step: Replayable, stash: Stash, candidate: Candidate, wanted: Reference | None,
    unmended: _Kept | None,
) -> _Tried:  # fmt: skip
    """A candidate under the scale that it needs, and what came of it."""
    if candidate.change is not None and wanted is not None:
        wanted, unmended = _reference_of_changed(step, stash, candidate.change), None
    settled, result = _settled(step, stash, candidate)
    if result.error is not None:
        said, plain = kind_and_words(result.error), step.replay(stash).error
        same = plain is not None and kind_and_words(plain) == said
        why = f"tried: still raises {said}" if same else f"could not be tried: {said}"
        return _Tried(settled, why)
    wrong = _complaint(stash, settled, result, wanted)
    if not wrong and wanted is not None and unmended is not None:
        wrong = unmended.gain(_Kept.of(stash, settled, result, wanted, unmended.weak))
    if wrong:
        return _Tried(settled, f"tried: {wrong}")
    return _Tried(settled, "", _weak(stash, settled, result, wanted))


def _weak(
    stash: Stash, settled: Candidate, result: Replayed, wanted: Reference | None
) -> str:  # fmt: skip
    """The weight matrix whose gradient is the least exact, where a fix leaves it below 20 dB."""
    if wanted is None or not wanted.finite:
        return ""
    scale = float(stash.scale) if settled.scale is None else settled.scale
    noisy = gradient_errors(result, wanted, scale).noisy(_SOUND_DB)
    if not noisy:
        return ""
    worst = min(noisy, key=lambda name: noisy[name])
    return f"; the gradient of {worst} keeps {noisy[worst]:z.0f} dB"


@dataclass(frozen=True)
class _Kept:
    """How near to its reference a replay is: its gradients, in dB, and the worst of its losses.

    Attributes
    ----------
    weak
        Parameters whose gradient is wrong, though the whole does not show it.
    """

    sqnr_db: float
    loss_error: float
    weak: list[str]

    @classmethod
    def of(
        cls, stash: Stash, candidate: Candidate, result: Replayed, wanted: Reference,
        weak: list[str] | None = None,
    ) -> _Kept:  # fmt: skip
        """Of a replay; the parameters that are weak in it, if they are not known before."""
        scale = float(stash.scale) if candidate.scale is None else candidate.scale
        pairs = zip(result.losses, wanted.losses, strict=True)
        missed = max((abs(float(loss) - ideal) for loss, ideal in pairs), default=0.0)
        errors = gradient_errors(result, wanted, scale)
        weak = errors.hidden() if weak is None else weak
        return cls(errors.least(weak)[0], missed, weak)

    def gain(self, mended: _Kept) -> str:
        """Why another replay is not clearly nearer; empty if it is."""
        loss = self.loss_error > 0 and mended.loss_error <= _NEARER_LOSS * self.loss_error
        if loss or mended.sqnr_db >= self.sqnr_db + NEARER_DB:
            return ""
        return (
            f"it gains next to nothing: gradients of {mended.sqnr_db:.0f} dB, "
            f"{self.sqnr_db:.0f} dB without it"
        )


def _unmended(step: Replayable, stash: Stash, wanted: Reference) -> _Kept | None:
    """How near the step is without a fix; None where that is too far."""
    settled, result = _settled(step, stash, AS_IT_IS)
    if not wanted.finite or _complaint(stash, settled, result, wanted):
        return None
    return _Kept.of(stash, settled, result, wanted)


def _reference_of_changed(
    step: Replayable, stash: Stash, change: Callable[[Any], Any]
) -> Reference | None:
    """What a step on other batches should give; None where that is not known."""
    batches = [replace(each, batch=change(each.batch)) for each in stash.micro_batches]
    wanted = reference(step, replace(stash, micro_batches=batches))
    if len(wanted.losses) == len(batches) or stash.before:  # an iteration may have any number
        return wanted
    return None


def _settled(step: Replayable, stash: Stash, candidate: Candidate) -> tuple[Candidate, Replayed]:
    """The same candidate under the loss scale that training would come to, and its replay."""
    result = replayed(step, stash, candidate, until_bad=True)
    if not step.scales_loss or candidate.scale is not None:
        return candidate, result
    for scale in lower_scales(step, stash):
        if result.clean or result.error is not None or not all(map(finite, result.losses)):
            break
        candidate = replace(candidate, scale=scale)
        result = replayed(step, stash, candidate, until_bad=True)
    return candidate, result


def _complaint(
    stash: Stash, candidate: Candidate, result: Replayed, wanted: Reference | None
) -> str:
    """Why a replay with a fix does not count as mended; empty if it does."""
    if result.error is not None:
        return f"raises {kind_and_words(result.error)}"
    if not result.clean:
        if not result.losses or not all(map(finite, result.losses)):
            return "still not finite"
        scale = stash.scale if candidate.scale is None else candidate.scale
        under = f", under a loss scale of {power(float(scale))}" if float(scale) != 1 else ""
        return f"still not finite: forward is, and gradients are not{under}"
    if wanted is None:
        return ""
    if poisoned := [name for name in result.poisoned if name not in wanted.poisoned]:
        return f"finite, but forward leaves inf or NaN in the buffer {poisoned[0]}"
    scale = float(stash.scale) if candidate.scale is None else candidate.scale
    return _difference(result, wanted, scale) if wanted.finite else ""


def _difference(result: Replayed, wanted: Reference, scale: float) -> str:
    """How a finite replay differs from what the step should have given; empty where it is close."""
    errors = gradient_errors(result, wanted, scale)
    if errors.sqnr_db < _SOUND_DB and (wrong := wrong_loss(result, wanted)):
        return f"finite, but {wrong}"
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


def wrong_loss(result: Replayed, wanted: Reference) -> str:
    """How a loss differs from what it should be; empty where none does."""
    within = wanted.within or [0.0] * len(wanted.losses)
    known = zip(result.losses, wanted.losses, wanted.terms, within, strict=True)
    for index, (loss, ideal, terms, missed) in enumerate(known):
        if abs(float(loss) - ideal) > max(_LOSS_WITHIN * terms, missed):
            which = which_loss(index, len(wanted.losses))
            return f"{which} is {float(loss):.4g} and should be {ideal:.4g}"
    return ""
