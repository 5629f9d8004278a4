"""Faults without NaN: values flushed to zero, lost in rounding, or swallowed by an infinity.

The step is compared with its float64 shadow, which makes comparisons and choices of its own. As
long as loss and gradients are what they should be, nothing is said: a rounding error that does not
matter is no fault. Where they are not, the first operation whose result is wrong although its
inputs were right is where the value was lost (`single`); else the lines are named whose rounding
adds up to it (`spread`).

A loss may be a small difference of large terms (a policy gradient with normalised advantages, a
critic): its error is held against the terms. And training follows the gradient, not the loss:
while the gradient is right, a wrong loss is only noted. A gradient that is mostly noise is no fault
of the precision either where training has come to its end: the noise is as small as ever, and the
signal is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ampwise import formats
from ampwise.errors import kind_and_words
from ampwise.numerics.explain import spread
from ampwise.numerics.explain.flushed import flushed_gradients
from ampwise.numerics.explain.lost import Lost, note
from ampwise.numerics.explain.miscounted import rounded_integers
from ampwise.numerics.explain.single import single_operations
from ampwise.numerics.observe.budget import makes_loss
from ampwise.numerics.observe.gradient_errors import GRADIENT_DB, GradientErrors, in_words
from ampwise.numerics.observe.operation_errors import FROM_NUMBERS, RIGHT_DB
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.observe.trace import Trace
from ampwise.numerics.observe.values import which_loss
from ampwise.policy import PRESETS
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise.telemetry.ring import StepRecord

LOSS_WITHIN = 0.02
"""Error of the loss, beside the terms it is the sum of, above which it is wrong."""

SOUND_DB = 20.0
"""SQNR of the whole gradient above which a wrong loss does no harm."""

_NUMBERS = 4
"""Numbers of the code that are looked at where a loss is wrong."""

_FLOOR_LOSS, _FLOOR_NOISE = 0.01, 0.1
"""Training is at its end when the loss is this small beside the first one, and the noise of the
gradient this small beside the first gradient."""


def silent_faults(
    step: Replayable, stash: Stash, trace: Trace, begun: StepRecord | None = None
) -> tuple[list[Lost], ShadowRun, GradientErrors]:
    """What is silently wrong in a window, the gravest first, and what shows it.

    Parameters
    ----------
    begun
        The first step of the training; None where it is not known.
    """
    run = _shadow(step, stash)
    errors = GradientErrors(run.replayed.gradients, run.gradients)
    if (error := run.replayed.error) is not None:
        words = f"The step was not compared with float64: {kind_and_words(error)}."
        return [note(words)], run, errors
    found: list[Lost] = []
    loss = ""
    damage = _damage(run, errors)
    floor = "" if begun is None else _floor(run, errors, stash, begun)
    if damage and floor:
        fmt = formats.lookup(step.policy.compute_dtype)
        return [note(f"Training has converged to the floor of {fmt}: {floor}.")], run, errors
    if not damage and (loss := _wrong_loss(run)):
        number = _wrong_number(step, stash, run, loss)
        found += [] if number is None else [number]
    if damage:
        found += single_operations(step, stash, trace, run, damage)
    by_lines = bool(damage) and not _severe(found) and _is_inner(run)
    if by_lines:
        found += spread.of_lines(step, stash, run, errors, damage)
    if not _severe(found):  # else they follow from it
        found += flushed_gradients(step, stash, run, errors)
    integers = rounded_integers(run, damage)
    found = integers + [each for each in found if not _same_place(each, integers)]
    if not floor and not by_lines and not _severe(found):
        found += spread.of_lines(step, stash, run, errors, damage)
    if loss and not _severe(found):
        found.append(note(f"{loss}; the gradient, which training follows, is right."))
    if errors.sqnr_db < 0 and not _severe(found):
        found.append(_unexplained(run, damage))
    return sorted(found, key=lambda each: not each.severe), run, errors


def _severe(found: Sequence[Lost]) -> bool:
    return any(each.severe for each in found)


def _same_place(lost: Lost, others: Sequence[Lost]) -> bool:
    """Whether a fault is where one of some others is: it has been told then."""
    at = lost.place.file_line
    return any(each.severe and each.place.file_line == at for each in others)


def _is_inner(run: ShadowRun) -> bool:
    """Whether a gradient that forward asks for loses its digits, where no loss scale lifts it."""
    return any(each.place.inner and each.local_db < RIGHT_DB for each in run.errors)


def is_sound(step: Replayable, stash: Stash) -> bool:
    """Whether loss and gradients of a step are what they should be, at the price of one shadow."""
    run = _decides(step, stash)
    errors = GradientErrors(run.replayed.gradients, run.gradients)
    return run.replayed.clean and not _damage(run, errors) and not spread.is_noise(errors)


def _shadow(step: Replayable, stash: Stash) -> ShadowRun:
    """The errors of all operations, beside what a step would give that decides without rounding."""
    run = shadow(step, stash)
    if run.decided:
        return run
    by_itself = _decides(step, stash)
    return replace(run, gradients=by_itself.gradients, losses=by_itself.losses)


def _decides(step: Replayable, stash: Stash) -> ShadowRun:
    """What a step would give that decides without rounding.

    Where its decisions are how many rows there are, as those of a router, that is known beside a
    run in float32 only.
    """
    run = shadow(step, stash, errors=False, decides=True)
    if run.followed:
        return run
    wide = shadow(step, stash, errors=False, decides=True, policy=PRESETS["fp32"])
    if not wide.replayed.clean:
        return run
    return replace(run, gradients=wide.gradients, losses=wide.losses, terms=wide.terms)


def _damage(run: ShadowRun, errors: GradientErrors) -> str:
    """How loss and gradients differ from what they should be; empty where they do not."""
    quality = errors.sqnr_db
    if quality < SOUND_DB and (loss := _wrong_loss(run)):
        return loss
    if quality < GRADIENT_DB:
        return f"the gradient has an SQNR of {quality:z.0f} dB against float64"
    wrong = errors.missing()
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return f"most of the gradient of {', '.join(list(wrong)[:3])}{more} is missing"
    noisy = errors.noisy()
    return in_words(noisy) if noisy else ""


def _wrong_loss(run: ShadowRun) -> str:
    """How a loss differs from what it should be; empty where none does."""
    known = zip(run.replayed.losses, run.losses, run.terms, strict=True)
    for index, (loss, ideal, terms) in enumerate(known):
        if abs(float(loss) - float(ideal)) > LOSS_WITHIN * terms:
            which = which_loss(index, len(run.losses))
            return f"{which} is {float(loss):.4g} and should be {float(ideal):.4g}"
    return ""


def _wrong_number(step: Replayable, stash: Stash, run: ShadowRun, loss: str) -> Lost | None:
    """A number of the code whose rounding makes most of a loss's error; None where none does.

    It is the same in every step, so training ends elsewhere, however right one gradient is.
    """
    numbers = [e for e in run.errors if e.name in (*FROM_NUMBERS, "tensor") and e.place.file]
    rounded = {e.place.file_line: e for e in numbers if e.local_db < math.inf}
    for each in list(rounded.values())[:_NUMBERS]:
        if makes_loss(step, stash, run, each.place):
            words = (
                f"A number on line {each.place.line} rounds in {each.dtype}, in every step alike, "
                f"and what it is used for is wrong: {loss}."
            )
            return Lost("PRECISION_LOSS", words, each.place, each.name, each.dtype, severe=True)
    return None


def _floor(run: ShadowRun, errors: GradientErrors, stash: Stash, begun: StepRecord) -> str:
    """How little is left to learn, where the noise is no larger than it ever was; else empty."""
    ideal = sum(abs(float(each)) for each in run.losses) / len(run.losses)
    noise, size = errors.noise / float(stash.scale), errors.norm / float(stash.scale)
    if ideal > _FLOOR_LOSS * abs(begun.loss) or noise > _FLOOR_NOISE * begun.grad_norm:
        return ""
    which = "the loss" if len(run.losses) == 1 else "the mean of the losses"
    return (
        f"{which} has come from {begun.loss:.3g} to {ideal:.2g}, and the gradient from a norm of "
        f"{begun.grad_norm:.3g} to {size:.2g}, where its rounding noise is {noise:.2g}. Only "
        "float32 for the last steps gets closer"
    )


def _unexplained(run: ShadowRun, damage: str) -> Lost:
    """Wrong in the end, but at no single operation: the worst of them."""
    worst = min(run.errors, key=lambda each: each.local_db)
    text = (
        f"No single operation loses the value; errors add up: {damage}. The least exact is "
        f"{worst.name} in {worst.dtype}, {worst.local_db:.0f} dB."
    )
    return Lost("PRECISION_LOSS", text, worst.place, worst.name, worst.dtype, severe=True)
