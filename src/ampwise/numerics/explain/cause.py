"""Why an operation broke, found by experiment on its captured inputs.

Three results of one operation are compared: the actual one, the *local* one (float64 on the actual
inputs) and the *shadow's* (float64 on what the inputs would be without rounding).

    actual  local           shadow
    bad     finite          any       beyond the format's range          RANGE_OVERFLOW
    bad     bad             finite    the inputs were damaged:
                a constant that should keep them from 0 was lost         EPS_UNDERFLOW
                a difference they were made of lost its digits           CANCELLATION
                an argument is 0 and should be a small number            UNDERFLOW
    bad     bad             bad       wrong in any precision             DOMAIN_ERROR
                in backward, where forward was finite                    BACKWARD_SINGULARITY
                softmax of a row of -inf                                 FULLY_MASKED_ROW
                a reduction over nothing                                 EMPTY_REDUCTION

A constant of the code beyond the format is a MASK_CONSTANT, and a backward that is clean under a
lower loss scale is SCALE_TOO_HIGH. Of fused attention it is the operation inside that is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampwise import formats
from ampwise.numerics.observe import domain
from ampwise.numerics.observe.ancestry import Ancestor, back_from
from ampwise.numerics.observe.attention import inside, is_attention, mask_of
from ampwise.numerics.observe.bits import NAN, NEGATIVE, all_bits, bad_bits, extreme_of
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.operations import FILLS, tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import counted, figure

_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
_REDUCTIONS = ("mean", "var", "std", "sum", "amax", "amin", "max", "min", "div", "logsumexp",
               "nll_loss_forward", "cross_entropy")  # fmt: skip
VARIANCES = ("std", "var", "std_mean", "var_mean")
_FEW = 4
"""Times the smallest number of a format below which a value counts as flushed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, and the two sentences that explain it.

    Attributes
    ----------
    made_by
        The operation, or tensor from outside, where it began, where that is not the root itself.
    inside
        The operation inside a fused one that broke.
    """

    cause: str
    explanation: str
    made_by: Ancestor | Root | None = None
    inside: str = ""


def explain(step: Replayable, stash: Stash, root: Root) -> Finding:
    """Cause of a root, by experiment."""
    return of_itself(root) or _damaged_inputs(step, stash, root)


def of_itself(root: Root) -> Finding | None:
    """Cause of a root as far as its own inputs show it, without a replay."""
    if root.func is None:
        return _from_outside(root)
    inner = inside(root)
    if inner is not None and (found := _by_itself(inner)) is not None:
        words = f"Inside {root.name}, computed in float32: {found.explanation}"
        return replace(found, explanation=words, inside=inner.name)
    return _by_itself(root)


def _by_itself(root: Root) -> Finding | None:
    experiments = (_empty, _one_sample, _masked_row, _fed, _beyond_range)
    return next((found for each in experiments if (found := each(root)) is not None), None)


def format_of(root: Root) -> formats.FloatFormat:
    """Format of a root's result."""
    dtype = root.outputs[0].dtype if root.outputs else torch.float32
    return formats.lookup(dtype)


def _from_outside(root: Root) -> Finding:
    kind = root.name
    what = "NaN" if root.bits & 1 else "inf"
    if kind == "batch":
        return Finding(
            "BAD_INPUT",
            f"{root.source.removeprefix('batch ')} holds {what} before the model sees it. No "
            "precision can train on it.",
        )
    return Finding(
        "BAD_PARAMETER" if kind == "parameter" else "BAD_BUFFER",
        f"The {root.source} holds {what} at the start of the step. It was damaged before: by an "
        "update, a checkpoint, or initialisation.",
    )


def _fed(root: Root) -> Finding | None:
    """Infinities of the batch (which may be a mask) that are no mask to this operation."""
    local = in_float64(root)
    source = root.fed_by
    if source is None or source.name != "batch" or local is None:
        return None
    if root.bits & ~all_bits(local):
        return None
    made = "NaN" if root.bits & NAN else "inf"
    return Finding(
        "BAD_INPUT",
        f"{source.source.removeprefix('batch ')} holds -inf before the model sees it, and "
        f"{root.name} on line {root.place.line} makes {made} of it. No precision can train on it.",
        source,
    )


def in_float64(root: Root) -> list[Tensor] | None:
    """The operation in float64 on the actual inputs; None where it has no such form."""
    try:
        return exact(root.func, root.args, root.kwargs)
    except UnsupportedError:
        return None


def _beyond_range(root: Root) -> Finding | None:
    """Local result finite: the format could not hold it, or an intermediate of it."""
    local = in_float64(root)
    if local is None or any(map(bad_bits, local)):
        return None
    fmt = format_of(root)
    peak = extreme_of(local)
    constant = constant_beyond(root, fmt)
    if constant is not None and abs(peak) >= fmt.max:
        return Finding(
            "MASK_CONSTANT",
            f"The constant {constant:g} is beyond {fmt}, which ends at {fmt.max:,.0f}, and becomes "
            f"{'-inf' if constant < 0 else 'inf'}. In float32 it is finite.",
        )
    if abs(peak) > fmt.max:
        return Finding(
            "RANGE_OVERFLOW",
            f"The result of {root.name} would be {figure(peak)}; {fmt} ends at "
            f"{figure(math.copysign(fmt.max, peak))}. Its inputs are finite, the largest "
            f"{figure(extreme_of(tensors((root.args, root.kwargs))))}.",
        )
    return Finding(
        "RANGE_OVERFLOW",
        f"Inside {root.name} an intermediate went beyond {fmt}, which ends at {figure(fmt.max)}. "
        f"The result itself, {figure(peak)}, would fit.",
    )


def constant_beyond(root: Root, fmt: formats.FloatFormat) -> float | None:
    """The constant of a fill or a mask that a format does not hold; None where there is none.

    Of a factor, such as a gain, it is the product that overflows.
    """
    if not (root.name in (*FILLS, "add", "add_") or (root.name == "mul" and _of_mask(root))):
        return None
    scalars = [each for each in (*root.args, *root.kwargs.values()) if isinstance(each, float)]
    # A constant tensor of one element is a scalar, too.
    scalars += [
        float(each)
        for each in tensors(root.args)
        if each.numel() == 1 and each.is_floating_point() and root.name in ("masked_fill", "where")
    ]
    return next((each for each in scalars if math.isfinite(each) and abs(each) > fmt.max), None)


def _of_mask(root: Root) -> bool:
    """Whether an operation's tensors hold nothing but 0 and 1."""
    return all(bool(((each == 0) | (each == 1)).all()) for each in tensors(root.args))


def _masked_row(root: Root) -> Finding | None:
    if is_attention(root.name):
        scores, dim = mask_of(root.func, root.args, root.kwargs), -1
    elif root.name in _SOFTMAX and isinstance(root.args[0], Tensor):
        scores, dim = root.args[0], int(root.args[1])
    else:
        return None
    if scores is None:
        return None
    rows = torch.isneginf(scores).all(dim=dim) if scores.is_floating_point() else ~scores.any(dim)
    count = int(rows.sum())
    if not count:
        return None
    return Finding(
        "FULLY_MASKED_ROW",
        f"{count} of {rows.numel()} rows of the softmax are masked completely: every score is "
        "-inf. Their softmax is 0/0 in any precision.",
    )


def _one_sample(root: Root) -> Finding | None:
    """A variance with as many degrees of freedom as it has none."""
    if root.name not in VARIANCES or bad_bits(root.args[0]):
        return None
    values, result = root.args[0], root.outputs[0]
    size = values.numel() // max(1, result.numel())
    if not size or not root.bits & NAN:
        return None
    return Finding(
        "EMPTY_REDUCTION",
        f"{root.name} of {counted(size, 'value')} divides by one less than their number, which is "
        f"{size - 1}. A spread needs two; with correction=0 that of one is 0.",
    )


def _empty(root: Root) -> Finding | None:
    given = tensors((root.args, root.kwargs))
    floats = [each for each in given if each.is_floating_point()]
    nothing = any(each.numel() == 0 for each in floats)
    counted = root.name == "nll_loss_forward" and len(root.outputs) > 0 and _all_ignored(root)
    if not counted and not (nothing and root.name in _REDUCTIONS):
        return None
    return Finding(
        "EMPTY_REDUCTION",
        f"{root.name} reduces over no elements: 0 divided by 0. Nothing was selected, or every "
        "target is ignored.",
    )


def _all_ignored(root: Root) -> bool:
    target, ignored = root.args[1], root.args[4]
    return bool((target == ignored).all())


def _damaged_inputs(step: Replayable, stash: Stash, root: Root) -> Finding:
    """Local result bad as well: would it be, had nothing been rounded before?"""
    at = (root.name, root.place, root.occurrence)
    return damaged(root, shadow(step, stash, errors=False, at=at))


def damaged(root: Root, run: ShadowRun) -> Finding:
    """The cause, given what the operation's inputs would be without rounding."""
    ideal = None
    if run.inputs is not None:
        try:
            ideal = exact(root.func, *run.inputs)
        except UnsupportedError:
            ideal = None
    if ideal is None or any(map(bad_bits, ideal)):
        return _mask_times_zero(root, run.makers) or _wrong_anyway(root)
    assert run.inputs is not None
    return _lost(root, run.inputs, run.makers)


def _wrong_anyway(root: Root) -> Finding:
    if root.place.phase == "backward":
        return Finding(
            "BACKWARD_SINGULARITY",
            f"Forward is finite here, but its derivative is not: {root.name} in backward divides "
            "by zero, or multiplies zero by infinity, in any precision. A branch that `where` does "
            "not take is differentiated all the same.",
        )
    outside = domain.in_words(root.name, root.args[0]) if root.args else ""
    if not outside:
        outside = f"{root.name} has no finite value for these inputs {_domain(root)}"
    return Finding(
        "DOMAIN_ERROR",
        f"{outside}. float64 gives none either: the fault is in the model or loss, not in the "
        "precision.",
    )


def _mask_times_zero(root: Root, makers: list[Ancestor | None]) -> Finding | None:
    """The -inf of a mask, times a gradient of 0: where something that is learned scales it."""
    given = tensors(root.args)
    if root.place.phase != "backward" or root.name != "mul" or len(makers) != len(given):
        return None
    masks = [(each, maker) for each, maker in zip(given, makers, strict=True)
             if bad_bits(each) == NEGATIVE]  # fmt: skip
    if len(masks) != 1:
        return None
    mask, maker = masks[0]
    fill = next((each for each in back_from(maker) if each.name in FILLS), None)
    count = int(torch.isneginf(mask).sum())
    made = f"made on line {fill.place.line}, " if fill is not None else ""
    return Finding(
        "BACKWARD_SINGULARITY",
        f"{counted(count, 'element')} of -inf, {made}{'is' if count == 1 else 'are'} a factor on "
        f"line {root.place.line}: the gradient of the other factor is 0 times -inf, which is NaN, "
        "in any precision. Mask after the scaling, or with a finite number.",
        fill,
    )


def _domain(root: Root) -> str:
    floats = [each for each in tensors(root.args) if each.is_floating_point() and each.numel()]
    if not floats:
        return ""
    offending = next((each for each in floats if bad_bits(each)), floats[-1])
    low, high = torch.aminmax(offending.double())
    return f"(from {float(low):.4g} to {float(high):.4g})"


def _lost(root: Root, ideal: tuple[Any, Any], makers: list[Ancestor | None]) -> Finding:
    """The inputs are not what they should be: how?"""
    triples = [
        (actual.double(), wanted, maker)
        for actual, wanted, maker in zip(tensors(root.args), tensors(ideal[0]), makers, strict=True)
        if actual.is_floating_point()
    ]
    fmt = formats.lookup(next(each.dtype for each in tensors(root.args)
                              if each.is_floating_point()))  # fmt: skip
    for actual, wanted, maker in reversed(triples):  # the last is a divisor, if there is one
        flushed = (actual == 0) & (wanted != 0)
        if bool(flushed.any()):
            return _zeros(root, fmt, wanted[flushed].abs(), maker)
        outside = (actual < 0) & (wanted >= 0)
        if bool(outside.any()):
            is_and_should = (
                f"An argument of {root.name} is {float(actual[outside].min()):.4g} and should be "
                f"{float(wanted[outside][actual[outside].argmin()]):.4g}"
            )
            return _cancelled(is_and_should, maker, fmt)
        edge = _at_the_edge(root.name, actual, wanted)
        if bool(edge.any()):
            return _edge(root, fmt, actual[edge], wanted[edge], maker)
    return Finding(
        "PRECISION_LOSS",
        f"The inputs of {root.name} lost so much that it has no finite value for them. In float64 "
        "the same computation is finite throughout.",
    )


def _at_the_edge(name: str, actual: Tensor, wanted: Tensor) -> Tensor:
    """Which arguments lie at the end of a function's domain, or outside, and should not."""
    known = domain.domain_of(name)
    if known is None:
        return torch.zeros_like(actual, dtype=torch.bool)
    below, above = known.outside(actual)
    low, high = known.outside(wanted)
    return (below | above) & ~(low | high)


def _edge(
    root: Root, fmt: formats.FloatFormat, actual: Tensor, wanted: Tensor, maker: Ancestor | None
) -> Finding:
    """Arguments that were rounded to the end of a domain: a bound that was lost, or digits."""
    to = float(actual[0])
    bound = next(
        (pair for pair in _lost_in(maker) if pair[0] != to and _rounded(pair[0], fmt) == to), None
    )
    count = counted(len(actual), "argument")
    if bound is None:
        return Finding(
            "PRECISION_LOSS",
            f"{count} of {root.name} rounded to {figure(to)}, which is the end of its domain, and "
            f"should be {figure(float(wanted[0]))}. {fmt} keeps {fmt.mantissa_bits + 1} bits.",
        )
    return _lost_bound(f"{count} of {root.name} reach {figure(to)}", *bound, fmt)


def _rounded(value: float, fmt: formats.FloatFormat) -> float:
    return round(value / fmt.ulp(value)) * fmt.ulp(value)


def _lost_bound(what: str, bound: float, by: Ancestor, fmt: formats.FloatFormat) -> Finding:
    """A bound just inside 1 that rounds to 1."""
    nearest = math.copysign(1.0 - fmt.eps / 2, bound)
    return Finding(
        "EPS_UNDERFLOW",
        f"{what}: the bound {bound!r} of {by.name} on line {by.place.line} rounds to "
        f"{math.copysign(1, bound):g} in {fmt}, and keeps nothing away. Its number next to it is "
        f"{nearest:.6g}.",
        by,
    )


def _zeros(root: Root, fmt: formats.FloatFormat, wanted: Tensor, maker: Ancestor | None) -> Finding:
    """Zeros where numbers should be: a constant that was lost, a difference, or small values."""
    least, most = float(wanted.min()), float(wanted.max())
    count = counted(len(wanted), "value")
    are = f"{count} that {root.name} needs {'are' if len(wanted) > 1 else 'is'} 0"
    eps = next((pair for pair in _lost_in(maker) if _guards(pair[0], least)), None)
    if eps is not None and eps[0] > 0.5:
        return _lost_bound(are, *eps, formats.lookup(eps[1].dtype))
    if eps is not None:
        return Finding(
            "EPS_UNDERFLOW",
            f"{are}: the constant {eps[0]:g}, which should keep them away from 0, is lost. The "
            f"smallest number of {fmt} is {fmt.min_subnormal:.2g}, and it keeps "
            f"{fmt.mantissa_bits + 1} bits.",
            _if_elsewhere(eps[1], root),
        )
    span = f"{least:.3g}" if most <= 1.001 * least else f"{least:.3g} to {most:.3g}"
    is_and_should = f"{are} and should be {span}"
    if most <= _FEW * fmt.min_subnormal:
        return Finding(
            "UNDERFLOW",
            f"{is_and_should}. The smallest number of {fmt} is {fmt.min_subnormal:.2g}.",
        )
    lost = next((each for each in back_from(maker) if each.cancels or each.flushed), None)
    if lost is not None and not lost.flushed:
        return _cancelled(is_and_should, maker, fmt)
    where = "" if lost is None else f", in {lost.name} on line {lost.place.line}"
    return Finding(
        "UNDERFLOW",
        f"{is_and_should}. On the way to them something fell below the smallest number of {fmt}, "
        f"{fmt.min_subnormal:.2g}{where}.",
        lost,
    )


def _if_elsewhere(made_by: Ancestor, root: Root) -> Ancestor | None:
    """Where it began, if that is another line: of its own the root shows more."""
    place = made_by.place
    return None if (place.file, place.line) == (root.place.file, root.place.line) else made_by


def _lost_in(maker: Ancestor | None) -> list[tuple[float, Ancestor]]:
    """Constants that had no effect, and the operations they were lost in, the nearest first."""
    return [(constant, each) for each in back_from(maker) for constant in each.lost]


def _guards(eps: float, least: float) -> bool:
    """Whether a constant, its root, or its distance from 1 would have kept a value away from 0."""
    parts = (eps, math.sqrt(abs(eps)), 1 - eps if eps > 0.5 else 0.0)
    return any(0.5 * least <= part <= 1.001 * least for part in parts)


def _cancelled(is_and_should: str, maker: Ancestor | None, fmt: formats.FloatFormat) -> Finding:
    """A difference of nearly equal numbers, where it was taken."""
    made_by = next((each for each in back_from(maker) if each.cancels), None)
    if made_by is None:
        return Finding(
            "CANCELLATION",
            f"{is_and_should}: a difference of nearly equal numbers lost its digits before. {fmt} "
            f"keeps {fmt.mantissa_bits + 1} bits.",
        )
    fmt = formats.lookup(made_by.dtype)
    if made_by.rounded_to is not None:
        end = made_by.rounded_to
        return Finding(
            "CANCELLATION",
            f"{is_and_should}: {made_by.name} on line {made_by.place.line} takes the difference to "
            f"{end:g} of numbers that rounded to {end:g}. Next below it {fmt} has "
            f"{end - fmt.ulp(end) / 2:.6g}; make the difference before rounding.",
            made_by,
        )
    left = f"{made_by.propagated_db:.0f} dB are left of {made_by.inputs_db:.0f} dB"
    if made_by.cancelled:
        left = f"{counted(made_by.cancelled, 'element')} of its result is lost"
        left = left if made_by.cancelled == 1 else left.replace(" is lost", " are lost")
    return Finding(
        "CANCELLATION",
        f"{is_and_should}: {made_by.name} on line {made_by.place.line} subtracts nearly equal "
        f"numbers, and their digits cancel. {fmt} keeps {fmt.mantissa_bits + 1} bits; {left}.",
        made_by,
    )
