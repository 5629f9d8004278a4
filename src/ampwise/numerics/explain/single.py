"""A single operation at which finite values went wrong, and the rounding before it that it shows.

The first whose result is wrong although its inputs were right; an infinity that was swallowed, and
a cast to float8, come before it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ampwise import formats
from ampwise.data import leaves
from ampwise.numerics.explain import float8
from ampwise.numerics.explain.lost import Lost
from ampwise.numerics.explain.roundings import (
    GROWS,
    TURNS,
    began,
    left_range,
    off_by,
    rounds,
    showing,
    subtracts,
)
from ampwise.numerics.observe.ancestry import (
    LOGARITHMS,
    Ancestor,
    back_from,
    cancelled,
    flushed_first,
    largest_before,
)
from ampwise.numerics.observe.budget import LEAST, harm_of, out_of_range
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.extent import extent_of, lost_elements, samples_in
from ampwise.numerics.observe.gradient_errors import GRADIENT_DB, GradientErrors
from ampwise.numerics.observe.operation_errors import RIGHT_DB, WRONG_DB, OperationError
from ampwise.numerics.observe.roots import HISTORY
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.observe.shares import roundings
from ampwise.numerics.observe.trace import Trace
from ampwise.numerics.observe.values import passed
from ampwise.numerics.result import Extent, Passed
from ampwise.policy import PRESETS
from ampwise.sqnr import sqnr_db
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import counted, figure

_DIVIDES = ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "pow")
"""Operations to which a small argument matters as much as a large one."""

_TRIED = 6
"""Lines whose rounding is tried by itself."""

_ABOUT = 0.5
"""Share of the harm of the worst of them, from which on one does about as much."""


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
            flushed = out_of_range(step, stash, run, root.place)
            if flushed is not None and flushed.part == "underflow":
                return [_told(left_range(flushed, stash), damage)]
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
    if each.place.inner:
        damage = f"{damage}. It is in a gradient that forward asks for, which no loss scale lifts"
    at = (each.name, each.place, each.occurrence)
    before = shadow(step, stash, errors=False, at=at, shares=True)
    if (zeros := _too_small(each, before, damage)) is not None:
        return [replace(zeros, extent=_extent(each, before, stash), history=_history(before))]
    own = each.local_db < RIGHT_DB and not _inherits(each, before)
    made_by = None if own else _rounded(step, stash, run, before)
    place = each.place if made_by is None else made_by.place
    gone = out_of_range(step, stash, run, place) if own or made_by is not None else None
    if gone is not None:
        return [replace(_told(left_range(gone, stash), damage), history=_history(before))]
    began = None if own else _where_it_began(step, stash, run, before, each, made_by, damage)
    lost = began or _lost_at(step, stash, each, damage, made_by)
    return [replace(lost, extent=_extent(each, before, stash), history=_history(before))]


def _too_small(error: OperationError, run: ShadowRun, damage: str) -> Lost | None:
    """The argument whose values are too small for its format, and make most of what is lost.

    Told by the elements, with the operation made in float64 with nothing else wrong. None if none.
    """
    if run.inputs is None or run.actual is None:
        return None
    given, spec = tree_flatten(run.actual[0])
    ideal, _ = tree_flatten(run.inputs[0])
    makers = iter(run.makers)
    for at, actual in enumerate(given):
        made_by = next(makers) if isinstance(actual, Tensor) else None
        if made_by is None or not made_by.flushed or not actual.is_floating_point():
            continue
        fmt = formats.lookup(actual.dtype)
        small = (ideal[at] != 0) & (ideal[at].abs() < fmt.min_normal)
        spoiled = [*ideal]
        spoiled[at] = torch.where(small, actual.detach().double(), ideal[at])
        try:
            wanted = exact(error.func, *run.inputs)[0]
            made = exact(error.func, tree_unflatten(spoiled, spec), run.inputs[1])[0]
            real = exact(error.func, *run.actual)[0]
        except UnsupportedError:
            return None
        lost = lost_elements(real, wanted)
        if int((lost_elements(made, wanted) & lost).sum()) > _ABOUT * int(lost.sum()):
            first, count = flushed_first(made_by) or made_by, counted(int(small.sum()), "value")
            words = (
                f"{count} of {small.numel():,} that {error.name} on "
                f"{error.place.line_from(first.place)} is given are below the normal numbers of "
                f"{fmt}, which end at {fmt.min_normal:.2g}, and 0 or left with few digits: "
                f"{first.name} on line {first.place.line} made them so. Silently wrong: {damage}."
            )
            return Lost("UNDERFLOW", words, first.place, first.name, first.dtype, severe=True)
    return None


def _told(lost: Lost, damage: str) -> Lost:
    """With what comes of it."""
    return replace(lost, explanation=f"{lost.explanation}. Silently wrong: {damage}.")


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
    if error.name not in GROWS or run.inputs is None or run.actual is None:
        return False
    try:
        given, wanted = exact(error.func, *run.actual)[0], exact(error.func, *run.inputs)[0]
    except UnsupportedError:
        return False
    return given.shape == wanted.shape and sqnr_db(given, wanted) < WRONG_DB


def _where_it_began(
    step: Replayable, stash: Stash, run: ShadowRun, before: ShadowRun, error: OperationError,
    made_by: Ancestor | None, damage: str,
) -> Lost | None:  # fmt: skip
    """The rounding, or the difference, before an operation that only shows it; None if it does not.

    Small errors of an argument become large where a function divides by it, or turns with it.

    Parameters
    ----------
    run
        The errors of all operations.
    before
        What the operation was given, and what that was made of.
    made_by
        The first rounding that spoiled it; None where that does no harm by itself.
    """
    makers = [each for each in before.makers if each is not None]
    if error.name in LOGARITHMS and (lost := _of_one(before, error, damage)) is not None:
        return lost
    if error.name in _DIVIDES:
        lost = (each for maker in makers for each in back_from(maker) if each.cancelled)
        if (difference := next(lost, None)) is not None:
            return _cancelled_at(difference, error, damage)
    if made_by is None or not _shows(error, made_by):
        return None
    known = (each for each in run.errors
             if (each.index, each.name) == (made_by.index, made_by.name))  # fmt: skip
    rounding = next(known, None)
    how = None if rounding is None else began(step, stash, rounding)
    how = how or rounds(made_by, made_by.extreme)
    words = f"{how.words}. {showing(error, made_by.place)}. Silently wrong: {damage}."
    return Lost(how.cause(error.name), words, made_by.place, made_by.name, made_by.dtype,
                severe=True)  # fmt: skip


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


def _rounded(step: Replayable, stash: Stash, run: ShadowRun, before: ShadowRun) -> Ancestor | None:
    """The first rounding that makes about as much of the harm as any before an operation.

    Norms show neither what became 0 beside larger elements, nor that of two terms with the same
    error none is left in their difference: it is tried what each line does alone. Where none does
    much, it is tried what all do: an error that both terms have may be nothing with either alone.
    None if that is little.
    """
    known = zip(before.brought, before.makers, strict=False)
    found = roundings([(share, maker) for share, maker in known if maker is not None])
    flushed = (each for maker in before.makers for each in back_from(maker) if each.flushed)
    found += [each for each in [flushed_first(next(flushed, None))] if each is not None]
    first: dict[tuple[str, int], Ancestor] = {}
    for each in sorted(found, key=lambda each: each.index):
        first.setdefault(each.place.file_line, each)
    lines = list(first.values())[:_TRIED]
    harms = [harm_of(step, stash, run, [each.place]) for each in lines]
    if max(harms, default=0.0) < LEAST:
        together = harm_of(step, stash, run, [each.place for each in lines]) if lines else 0.0
        return lines[0] if together >= _ABOUT else None
    least = max(LEAST, _ABOUT * max(harms))
    return next(each for harm, each in zip(harms, lines, strict=True) if harm >= least)


def _shows(error: OperationError, made_by: Ancestor) -> bool:
    """Whether an operation only shows an error that began before it.

    A difference in 16 bits of what its own function made is where the digits cancel.
    """
    if error.name in (*TURNS, *GROWS) or error.dtype not in formats.HALF:
        return True
    here, there = error.place, made_by.place
    return subtracts(error.name) and (here.file, here.function) != (there.file, there.function)


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


def _lost_at(
    step: Replayable, stash: Stash, error: OperationError, damage: str, made_by: Ancestor | None
) -> Lost:
    """The operation itself: it cancels digits, or rounds them away."""
    own = error.local_db < RIGHT_DB
    cause = "CANCELLATION" if not own and subtracts(error.name) else "PRECISION_LOSS"
    off = f"is off by {off_by(error.propagated_db)}, its inputs by {off_by(error.inputs_db)}"
    if cause == "CANCELLATION":
        words = (
            f"{error.name} subtracts nearly equal numbers: its result, at most "
            f"{figure(error.exact_amax)}, {off}"
        )
    else:
        words = f"The result of {error.name} in {error.dtype} {off}"
    how = began(step, stash, error) if own else None
    if made_by is not None:
        how = rounds(made_by, made_by.extreme)
    words = words if how is None else f"{words}. {how.words}"
    return Lost(cause, f"{words}. Silently wrong: {damage}.", error.place, error.name,
                error.dtype, severe=True)  # fmt: skip
