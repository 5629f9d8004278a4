"""A single operation at which finite values went wrong, and the rounding before it that it shows.

The first whose result is wrong although its inputs were right; an infinity that was swallowed, and
a cast to float8, come before it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from ampwise import formats
from ampwise.data import leaves
from ampwise.numerics.explain import float8
from ampwise.numerics.explain.lost import Lost
from ampwise.numerics.observe.ancestry import (
    LOGARITHMS,
    Ancestor,
    back_from,
    cancelled,
    largest_before,
)
from ampwise.numerics.observe.budget import is_harmless
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.extent import extent_of, lost_elements, samples_in
from ampwise.numerics.observe.gradient_errors import GRADIENT_DB, GradientErrors
from ampwise.numerics.observe.operation_errors import RIGHT_DB, WRONG_DB, OperationError
from ampwise.numerics.observe.roots import HISTORY
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.observe.shares import roundings
from ampwise.numerics.observe.trace import Trace
from ampwise.numerics.observe.values import passed
from ampwise.numerics.result import Extent, Passed, percent
from ampwise.policy import PRESETS
from ampwise.sqnr import sqnr_db
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import counted, figure

_DIFFERENCES = ("sub", "add", "mean", "sum", "var", "addmm", "rsub", "native_layer_norm",
                "native_batch_norm", "var_mean")  # fmt: skip

_DIVIDES = ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "pow")
"""Operations to which a small argument matters as much as a large one."""

_TRIED = 6
"""Lines whose rounding is tried by itself."""

_TURNS = ("sin", "cos", "tan")

_GROWS = ("cumprod", "prod", "pow", "exp", "exp2", "expm1")
"""Operations that make a small relative, or absolute, error of an argument a large one."""


def single_operations(
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
            line = place.line_from(root.place)
            note = f"{op} on {line} makes finite, wrong values of it: {damage}."
            return [Lost(None, note, root.place, root.name, "", severe=True, root=root)]
    if (cast := float8.worst_cast(run.errors)) is not None and _sound_without(step, stash, run):
        each, cause, words = cast
        return [Lost(cause, f"{words}. Silently wrong: {damage}.", each.place, each.name,
                     each.dtype, severe=True)]  # fmt: skip
    each = next((each for each in run.errors if each.enlarges), None)
    if each is None:
        return []
    at = (each.name, each.place, each.occurrence)
    before = shadow(step, stash, errors=False, at=at, shares=True)
    own = each.local_db < RIGHT_DB and not _inherits(each, before)
    made_by = None if own else _rounded(step, stash, run, each, before)
    began = None if own else _where_it_began(before, each, made_by, damage)
    lost = began or _lost_at(each, damage, made_by)
    return [replace(lost, extent=_extent(each, before, stash), history=_history(before))]


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


def _where_it_began(
    run: ShadowRun, error: OperationError, made_by: Ancestor | None, damage: str
) -> Lost | None:
    """The rounding, or the difference, before an operation that only shows it; None if it does not.

    Small errors of an argument become large where a function divides by it, or turns with it.

    Parameters
    ----------
    run
        What the operation was given, and what that was made of.
    made_by
        The first rounding that spoiled it; None where that does no harm by itself.
    """
    makers = [each for each in run.makers if each is not None]
    if error.name in LOGARITHMS and (lost := _of_one(run, error, damage)) is not None:
        return lost
    if error.name in _DIVIDES:
        lost = (each for maker in makers for each in back_from(maker) if each.cancelled)
        if (difference := next(lost, None)) is not None:
            return _cancelled_at(difference, error, damage)
    if made_by is None or not _shows(error, made_by):
        return None
    kept = _kept(made_by)
    line = f"on {error.place.line_from(made_by.place)}"
    if error.name in _TURNS:
        words = (
            f"{made_by.name} on line {made_by.place.line} rounds: {kept.format('is')}. "
            f"{error.name} {line}, which repeats every 6.28, takes what is made of it for an angle"
        )
    else:
        shows = "makes a small error large" if error.name in _GROWS else "only shows it"
        if error.dtype in formats.HALF and _subtracts(error.name):
            shows = f"takes a difference of about {error.exact_amax:.3g} of such numbers"
        words = (
            f"{made_by.name} on line {made_by.place.line} rounds: {kept.format('is')}. "
            f"{error.name} {line}, in {error.dtype}, {shows}: it keeps "
            f"{error.propagated_db:.0f} dB, of {error.inputs_db:.0f} dB"
        )
    cause = "CANCELLATION" if _subtracts(error.name) else "PRECISION_LOSS"
    return Lost(cause, f"{words}. Silently wrong: {damage}.", made_by.place, made_by.name,
                made_by.dtype, severe=True)  # fmt: skip


def _of_one(run: ShadowRun, error: OperationError, damage: str) -> Lost | None:
    """A logarithm of numbers that rounded to 1, themselves right; None where it is of others."""
    assert run.actual is not None
    assert run.inputs is not None
    given, ideal = run.actual[0], run.inputs[0]
    made, wanted = (exact(error.func, *each)[0] for each in (run.actual, run.inputs))
    lost, one = cancelled(error.name, given, ideal, made, wanted)
    if one is None:
        return None
    fmt = formats.lookup(given[0].dtype)
    words = (
        f"{error.name} on line {error.place.line} is of what rounded to 1: "
        f"{counted(lost, 'element')} of its result lost all digits of the {fmt.mantissa_bits + 1} "
        f"bits of {fmt}. Silently wrong: {damage}."
    )
    return Lost("CANCELLATION", words, error.place, error.name, str(fmt), severe=True)


def _rounded(
    step: Replayable, stash: Stash, run: ShadowRun, error: OperationError, before: ShadowRun
) -> Ancestor | None:
    """The first rounding that spoiled what an operation was given, and does harm by itself.

    Norms do not show that of two terms with the same error none is left in their difference.
    """
    pairs = zip(before.brought, before.makers, strict=False)
    found = roundings([(share, maker) for share, maker in pairs if maker is not None])
    harmless: dict[tuple[str, int], bool] = {(error.place.file, error.place.line): False}
    for each in found:
        at = each.place.file, each.place.line
        if at not in harmless:
            if len(harmless) > _TRIED:
                break
            harmless[at] = is_harmless(step, stash, run, each.place)
        if not harmless[at]:
            return each
    return None


def _shows(error: OperationError, made_by: Ancestor) -> bool:
    """Whether an operation only shows an error that began before it.

    A difference in 16 bits of what its own function made is where the digits cancel.
    """
    if error.name in (*_TURNS, *_GROWS) or error.dtype not in formats.HALF:
        return True
    here, there = error.place, made_by.place
    return _subtracts(error.name) and (here.file, here.function) != (there.file, there.function)


def _kept(made_by: Ancestor) -> str:
    """How its largest result is rounded, around the verb."""
    fmt, most = formats.lookup(made_by.dtype), made_by.extreme
    below = fmt.ulp(math.nextafter(most, 0))  # all others are smaller
    return f"{figure(most)} {{}} kept in {fmt} at a spacing of {below:g}"


def _cancelled_at(made_by: Ancestor, error: OperationError, damage: str) -> Lost:
    fmt = formats.lookup(made_by.dtype)
    rounded = made_by.rounded_to
    what = "nearly equal numbers" if rounded is None else f"from {rounded:g} what rounded to it"
    what = "is of what rounded to 1" if made_by.name in LOGARITHMS else f"subtracts {what}"
    words = (
        f"{made_by.name} on line {made_by.place.line} {what}: "
        f"{counted(made_by.cancelled, 'element')} of its result lost all digits of the "
        f"{fmt.mantissa_bits + 1} bits of {fmt}; {error.name} on "
        f"{error.place.line_from(made_by.place)} shows it"
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
    if error.place.inner:
        damage = f"{damage}. It is in a gradient that forward asks for, which no loss scale lifts"
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
