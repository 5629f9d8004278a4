"""Faults without NaN: values flushed to zero, lost in rounding, or swallowed by an infinity.

The step is compared with its float64 shadow. As long as loss and gradients are what they should be,
nothing is said: a rounding error that does not matter is no fault. Where they are not, the first
operation whose result is wrong although its inputs were right is where the value was lost.

A loss may be a small difference of large terms (a policy gradient with normalised advantages, a
critic): its error is held against the terms. And training follows the gradient, not the loss:
while the gradient is right, a wrong loss is only noted. So is a line that makes a small error
large, where the gradient is far from exact and float32 there makes it better. A gradient that is
mostly noise is no fault of the precision either where training has come to its end: the noise is as
small as ever, and the signal is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ampwise import formats
from ampwise.data import leaves
from ampwise.numerics.explain import float8
from ampwise.numerics.observe.ancestry import Ancestor, back_from, largest_before
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.extent import extent_of, lost_elements, samples_in
from ampwise.numerics.observe.gradient_errors import GradientErrors, in_words
from ampwise.numerics.observe.operation_errors import RIGHT_DB, WRONG_DB, OperationError
from ampwise.numerics.observe.roots import HISTORY, Root
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.observe.shares import rounded_first
from ampwise.numerics.observe.trace import Trace
from ampwise.numerics.observe.values import passed, which_loss
from ampwise.numerics.remedy.precision import in_float32
from ampwise.numerics.result import CauseName, Extent, Passed, percent
from ampwise.places import NOWHERE, Place
from ampwise.policy import PRESETS
from ampwise.sqnr import sqnr_db
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise.telemetry.ring import StepRecord
from ampwise_lint.base.words import counted, figure, power

GRADIENT_DB = 3.0
"""SQNR of the whole gradient below which a step is wrong: an error of 70 % of its norm. Small and
ill-conditioned networks (batch norm over a few samples) fall to 8 dB in bfloat16, and train."""

LOSS_WITHIN = 0.02
"""Error of the loss, beside the terms it is the sum of, above which it is wrong."""

SOUND_DB = 20.0
"""SQNR of the whole gradient above which a wrong loss does no harm."""

NOTED_DB, GAINED_DB = 25.0, 6.0
"""SQNR of the whole gradient below which a line is noted that makes its error large; and by how
much the gradient is better with it in float32."""

_TRIED = 3
"""Lines that are tried for that."""

_FLOOR_LOSS, _FLOOR_NOISE = 0.01, 0.1
"""Training is at its end when the loss is this small beside the first one, and the noise of the
gradient this small beside the first gradient."""

FLUSHED = 0.5
"""Share of a parameter's gradient (by norm) that underflow may take before it is a fault."""

_MOST_POWER = 126
"""Of a loss scale, which is kept in float32."""

_DIFFERENCES = ("sub", "add", "mean", "sum", "var", "addmm", "rsub", "native_layer_norm",
                "native_batch_norm", "var_mean")  # fmt: skip


_DIVIDES = ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "pow")
"""Operations to which a small argument matters as much as a large one."""

_TURNS = ("sin", "cos", "tan")

_NARROW = ("float16", "bfloat16")

_GROWS = ("cumprod", "prod", "pow", "exp", "exp2", "expm1")
"""Operations that make a small relative, or absolute, error of an argument a large one."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Where a value was lost, why, and what is to be said.

    Attributes
    ----------
    cause
        None where `root` is still to be explained, and of a note.
    severe
        Whether it is a fault; else a note.
    scale
        The loss scale that mends it.
    """

    cause: CauseName | None
    explanation: str
    place: Place
    op: str
    dtype: str
    severe: bool
    root: Root | None = None
    scale: float | None = None
    extent: Extent | None = None
    history: Sequence[Passed] = ()


def silent_faults(
    step: Replayable, stash: Stash, trace: Trace, begun: StepRecord | None = None
) -> tuple[list[Lost], ShadowRun, GradientErrors]:
    """What is silently wrong in a window, the gravest first, and what shows it.

    Parameters
    ----------
    begun
        The first step of the training; None where it is not known.
    """
    run = shadow(step, stash)
    errors = GradientErrors(run.replayed.gradients, run.gradients)
    found: list[Lost] = []
    damage = _damage(run, errors)
    if damage and begun is not None and (floor := _floor(run, errors, stash, begun)):
        fmt = formats.lookup(step.policy.compute_dtype)
        return [_note(f"Training has converged to the floor of {fmt}: {floor}.")], run, errors
    if not damage and (loss := _wrong_loss(run)):
        found.append(_note(f"{loss}; the gradient, which training follows, is right."))
    if damage:
        found += _culprits(step, stash, trace, run, damage)
    if not any(each.severe for each in found):  # else they follow from it
        found += _underflow(step, stash, run, errors)
    found = _rounded_integers(run, damage) + found
    if not found and errors.sqnr_db < NOTED_DB and not _near_its_end(run, errors, stash, begun):
        found += _moderate(step, stash, run, errors)
    if errors.sqnr_db < 0 and not any(each.severe for each in found):
        found.append(_unexplained(run, damage))
    return sorted(found, key=lambda each: not each.severe), run, errors


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


def _note(text: str) -> Lost:
    """Something to be said that is no fault."""
    return Lost(None, text[0].upper() + text[1:], NOWHERE, "", "", severe=False)


def _culprits(
    step: Replayable, stash: Stash, trace: Trace, run: ShadowRun, damage: str
) -> list[Lost]:
    """The operations at which values went wrong."""
    for root in trace.roots.values():
        if root.func is None or root.swallowed_by is None:
            continue
        later = [e for e in run.errors if e.index > root.index
                 and (e.name, e.place) == root.swallowed_by[:2]]  # fmt: skip
        if later and later[0].propagated_db < RIGHT_DB:
            op, place, _ = root.swallowed_by
            note = f"{op} on line {place.line} makes finite, wrong values of it: {damage}."
            return [Lost(None, note, root.place, root.name, "", severe=True, root=root)]
    if (cast := float8.worst_cast(run.errors)) is not None and _sound_without(step, stash, run):
        each, cause, words = cast
        return [Lost(cause, f"{words}. Silently wrong: {damage}.", each.place, each.name,
                     each.dtype, severe=True)]  # fmt: skip
    each = next(filter(_enlarges, run.errors), None)
    if each is None:
        return []
    at = (each.name, each.place, each.occurrence)
    before = shadow(step, stash, errors=False, at=at, shares=True)
    own = each.local_db < RIGHT_DB and not _inherits(each, before)
    began = None if own else _where_it_began(before, each, damage)
    lost = began or _lost_at(each, damage, None if own else _rounded(before))
    return [replace(lost, extent=_extent(each, before, stash), history=_history(before))]


def _near_its_end(
    run: ShadowRun, errors: GradientErrors, stash: Stash, begun: StepRecord | None
) -> bool:
    """Whether little is left to learn, as far as that is known."""
    return begun is not None and bool(_floor(run, errors, stash, begun))


def _moderate(step: Replayable, stash: Stash, run: ShadowRun, errors: GradientErrors) -> list[Lost]:
    """A line that makes a small error large, and the gradient worse, though training goes on.

    Said where float32 there was tried, and the gradient is better by it.
    """
    first: dict[Place, OperationError] = {}
    for each in filter(_enlarges, run.errors):
        first.setdefault(each.place, each)
    for each in list(first.values())[:_TRIED]:
        at = (each.name, each.place, each.occurrence)
        began = _rounded(shadow(step, stash, errors=False, at=at, shares=True))
        for island in in_float32(step, each.place if began is None else began.place, ()):
            result = step.replay(stash, around=island.around)
            kept = GradientErrors(result.gradients, run.gradients).sqnr_db
            if result.clean and kept >= errors.sqnr_db + GAINED_DB:
                words = _enlarged(each, began)
                return [_note(
                    f"{words}. The gradient has {errors.sqnr_db:.0f} dB against float64; with "
                    f"{island.what}, tried on this step, it has {kept:.0f} dB."
                )]  # fmt: skip
    return []


def _enlarges(error: OperationError) -> bool:
    """Whether what a forward operation gives is wrong, and what it was given is right."""
    known = error.inputs_db >= RIGHT_DB and error.propagated_db < WRONG_DB
    return known and error.place.phase == "forward"


def _enlarged(error: OperationError, made_by: Ancestor | None) -> str:
    words = (
        f"On line {error.place.line} {error.name} keeps {error.propagated_db:.0f} dB of its "
        f"result, of {error.inputs_db:.0f} dB in its inputs"
    )
    if made_by is None:
        return words
    rounds = f"{made_by.name} on line {made_by.place.line} rounds"
    return f"{words}; {rounds}: {_kept(made_by).format('is')}"


def _sound_without(step: Replayable, stash: Stash, run: ShadowRun) -> bool:
    """Whether a step whose policy is float8 has a sound gradient in bfloat16."""
    if not step.policy.float8:  # the model rounds by itself
        return True
    wider = replace(PRESETS["bf16"], islands=step.policy.islands)
    result = step.replay(stash, policy=wider)
    errors = GradientErrors(result.gradients, run.gradients)
    return result.clean and errors.sqnr_db >= GRADIENT_DB and not errors.missing()


def _inherits(error: OperationError, run: ShadowRun) -> bool:
    """Whether an operation would be wrong by what it was given, had it rounded nothing itself."""
    if error.name not in _GROWS or run.inputs is None or run.actual is None:
        return False
    try:
        given, wanted = exact(error.func, *run.actual)[0], exact(error.func, *run.inputs)[0]
    except UnsupportedError:
        return False
    return given.shape == wanted.shape and sqnr_db(given, wanted) < WRONG_DB


def _where_it_began(run: ShadowRun, error: OperationError, damage: str) -> Lost | None:
    """The rounding, or the difference, before an operation that only shows it; None if it does not.

    Small errors of an argument become large where a function divides by it, or turns with it.

    Parameters
    ----------
    run
        What the operation was given, and what that was made of.
    """
    makers = [each for each in run.makers if each is not None]
    if error.name in _DIVIDES:
        lost = (each for maker in makers for each in back_from(maker) if each.cancelled)
        if (made_by := next(lost, None)) is not None:
            return _cancelled_at(made_by, error, damage)
    made_by = _rounded(run)
    if made_by is None or not _shows(error, made_by):
        return None
    kept = _kept(made_by)
    line = f"on line {error.place.line}"
    if error.name in _TURNS:
        words = (
            f"Angles of {kept.format('are')}, by {made_by.name} on line {made_by.place.line}, and "
            f"{error.name} {line} repeats every 6.28"
        )
    else:
        shows = "makes a small error large" if error.name in _GROWS else "only shows it"
        if error.dtype in _NARROW and _subtracts(error.name):
            shows = f"takes a difference of about {error.exact_amax:.3g} of such numbers"
        words = (
            f"{made_by.name} on line {made_by.place.line} rounds: {kept.format('is')}. "
            f"{error.name} {line}, in {error.dtype}, {shows}: it keeps "
            f"{error.propagated_db:.0f} dB, of {error.inputs_db:.0f} dB"
        )
    cause = "CANCELLATION" if _subtracts(error.name) else "PRECISION_LOSS"
    return Lost(cause, f"{words}. Silently wrong: {damage}.", made_by.place, made_by.name,
                made_by.dtype, severe=True)  # fmt: skip


def _rounded(run: ShadowRun) -> Ancestor | None:
    """The first rounding that spoiled what an operation was given."""
    pairs = zip(run.brought, run.makers, strict=False)
    return rounded_first([(share, maker) for share, maker in pairs if maker is not None])


def _shows(error: OperationError, made_by: Ancestor) -> bool:
    """Whether an operation only shows an error that began before it.

    A difference in 16 bits of what its own function made is where the digits cancel.
    """
    if error.name in (*_TURNS, *_GROWS) or error.dtype not in _NARROW:
        return True
    here, there = error.place, made_by.place
    return _subtracts(error.name) and (here.file, here.function) != (there.file, there.function)


def _kept(made_by: Ancestor) -> str:
    """How its largest result is rounded, around the verb."""
    fmt, most = formats.lookup(made_by.dtype), made_by.extreme
    return f"{figure(most)} {{}} kept in {fmt} at a spacing of {fmt.ulp(most):g}"


def _cancelled_at(made_by: Ancestor, error: OperationError, damage: str) -> Lost:
    fmt = formats.lookup(made_by.dtype)
    rounded = made_by.rounded_to
    what = "nearly equal numbers" if rounded is None else f"from {rounded:g} what rounded to it"
    words = (
        f"{made_by.name} on line {made_by.place.line} subtracts {what}: "
        f"{counted(made_by.cancelled, 'element')} of its result lost all digits of the "
        f"{fmt.mantissa_bits + 1} bits of {fmt}; {error.name} on line {error.place.line} shows it"
    )
    return Lost("CANCELLATION", f"{words}. Silently wrong: {damage}.", made_by.place, made_by.name,
                made_by.dtype, severe=True)  # fmt: skip


def _extent(error: OperationError, run: ShadowRun, stash: Stash) -> Extent | None:
    """Which elements of an operation's result are wrong, by what it was given; None if unknown."""
    if run.inputs is None or run.actual is None or error.func is None:
        return None
    try:
        wanted = exact(error.func, *run.inputs)[0]
    except UnsupportedError:
        return None
    made = error.func(*run.actual[0], **run.actual[1])
    if not isinstance(made, Tensor) or made.shape != wanted.shape:
        return None
    batches = [each for batch in stash.micro_batches for _, each in leaves(batch.batch)]
    return extent_of(lost_elements(made, wanted), samples_in(batches))


def _history(run: ShadowRun) -> list[Passed]:
    """The operations before the one that was asked for, and how large what they gave was."""
    makers = [each for each in run.makers if each is not None]
    if not makers:
        return []
    chain = largest_before(max(makers, key=lambda each: abs(each.extreme)), HISTORY)
    return passed(chain)


def _subtracts(name: str) -> bool:
    return any(word in name for word in _DIFFERENCES)


def _lost_at(error: OperationError, damage: str, made_by: Ancestor | None) -> Lost:
    fmt = formats.lookup(error.dtype)
    own = error.local_db < RIGHT_DB
    if own and error.flushed > 0.5:
        cause = "UNDERFLOW"
        words = (
            f"{error.name} flushes {percent(error.zeros)} of its values to zero: they should be "
            f"up to {error.exact_amax:.3g}, and {fmt} ends at {fmt.min_subnormal:.2g} downwards"
        )
    elif not own and _subtracts(error.name):
        cause = "CANCELLATION"
        words = (
            f"{error.name} subtracts nearly equal numbers: its result, about {error.exact_amax:.3g}"
            f", keeps {error.propagated_db:.0f} dB, its inputs had {error.inputs_db:.0f} dB"
        )
        if made_by is not None:
            words = f"{words}. Before it, {_kept(made_by).format('is')}"
    else:
        cause = "PRECISION_LOSS"
        words = (
            f"{error.name} in {error.dtype} keeps {error.propagated_db:.0f} dB of its result "
            f"({error.inputs_db:.0f} dB in its inputs)"
        )
    return Lost(cause, f"{words}. Silently wrong: {damage}.", error.place, error.name,
                error.dtype, severe=True)  # fmt: skip


def _underflow(
    step: Replayable, stash: Stash, run: ShadowRun, errors: GradientErrors
) -> list[Lost]:
    """Parameters whose gradients became zero on the way."""
    wrong = errors.missing()
    lost = {name: each.flushed for name, each in wrong.items() if each.flushed > FLUSHED}
    if not lost:
        return []
    needed = _scale_for(step, stash, [run.gradients[name] for name in lost])
    if needed <= float(stash.scale):  # they fit the format as it is: sums that cancel
        return []
    scale = _scale_that_lifts(step, stash, run, list(lost), needed)
    named = ", ".join(f"{name} {percent(share)}" for name, share in list(lost.items())[:6])
    more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
    first = next(iter(lost))
    fmt = formats.lookup(step.policy.compute_dtype)
    explanation = (
        f"Gradients underflow in {fmt}: of {len(lost)} of {len(run.gradients)} parameters most of "
        f"the gradient became zero ({named}{more}). {_lifts(scale, needed, float(stash.scale))}"
    )
    place = _maker_of(first, run)
    return [Lost("UNDERFLOW", explanation, place, "", fmt.name, severe=True, scale=scale,
                 extent=_zeros_in(run, list(lost)))]  # fmt: skip


def _zeros_in(run: ShadowRun, names: Sequence[str]) -> Extent:
    """How many elements of some gradients are 0 and should not be."""
    pairs = [(run.replayed.gradients[name], run.gradients[name]) for name in names]
    zeros = sum(int(((actual == 0) & (wanted != 0)).sum()) for actual, wanted in pairs)
    return Extent(zeros, sum(wanted.numel() for _, wanted in pairs))


def _lifts(scale: float | None, needed: float, current: float) -> str:
    """What was tried for them."""
    if scale is not None:
        return f"Under a loss scale of {power(scale)}, tried on this step, they are there."
    return (
        f"The loss scale is {power(current)}. It would take one of {power(needed)}, under which, "
        "as under smaller ones that were tried, other gradients overflow or these stay zero."
    )


def _scale_that_lifts(
    step: Replayable, stash: Stash, run: ShadowRun, lost: Sequence[str], needed: float
) -> float | None:
    """The largest loss scale up to the needed one under which they are there; None without one."""
    current = float(stash.scale)
    scale = needed
    while scale > current:
        result = step.replay(stash, scale=scale)
        if result.clean:
            errors = GradientErrors(result.gradients, run.gradients, scale / current)
            return None if any(name in errors.missing() for name in lost) else scale
        scale /= 4
    return None


def _scale_for(step: Replayable, stash: Stash, gradients: list[Tensor]) -> float:
    """Power of two that lifts 99 % of the non-zero gradients into the normal numbers."""
    fmt = formats.lookup(step.policy.compute_dtype)
    least = math.inf
    for each in gradients:
        held = each.abs().flatten()
        held = held[held > 0]
        if held.numel():
            kept = held[torch.randperm(held.numel())[:100_000]] if held.numel() > 100_000 else held
            least = min(least, float(torch.quantile(kept, 0.01)))
    if not math.isfinite(least) or least <= 0:
        return float(stash.scale)
    needed = math.ceil(math.log2(fmt.min_normal / least)) + math.log2(float(stash.scale))
    return 2.0 ** max(0, min(_MOST_POWER, needed))


def _maker_of(parameter: str, run: ShadowRun) -> Place:
    """Where a parameter is used: the first forward operation of its module."""
    module = parameter.rpartition(".")[0]
    for each in run.errors:
        if each.place.phase == "forward" and each.place.module == module:
            place = each.place
            return Place("backward", module, place.call, place.file, place.line, place.library)
    return NOWHERE


def _rounded_integers(run: ShadowRun, damage: str) -> list[Lost]:
    """Positions or counters beyond the integers that the format holds.

    A fault where something becomes wrong by them, such as the cosine of a position or an index. The
    length that a mean divides by may be rounded as any other number.
    """
    harm = bool(damage) or any(each.miscounted for each in run.errors)
    for each in run.errors:
        if each.integers and each.place.phase == "forward":
            fmt = formats.lookup(each.dtype)
            most = 2 ** (fmt.mantissa_bits + 1)
            if each.name.startswith("add"):
                text = (
                    f"Counts stop at {most:,} in {fmt}. On line {each.place.line} {most:,} + 1 is "
                    f"{most:,} again."
                )
            else:
                text = (
                    f"Positions or counts of up to {each.exact_amax:,.0f} are kept in {fmt}, which "
                    f"counts to {most:,} and goes on in steps of "
                    f"{fmt.ulp(each.exact_amax):g}. Neighbours become one."
                )
            if not harm:
                return [_note(f"{text} Here (line {each.place.line}) it does no harm.")]
            return [Lost("PRECISION_LOSS", text, each.place, each.name, each.dtype,
                         severe=True, extent=each.miscounts)]  # fmt: skip
    return []


def _unexplained(run: ShadowRun, damage: str) -> Lost:
    """Wrong in the end, but at no single operation: the worst of them."""
    worst = min(run.errors, key=lambda each: each.local_db)
    text = (
        f"No single operation loses the value; errors add up: {damage}. The least exact is "
        f"{worst.name} in {worst.dtype}, {worst.local_db:.0f} dB."
    )
    return Lost("PRECISION_LOSS", text, worst.place, worst.name, worst.dtype, severe=True)
