"""BACKWARD_SINGULARITY: forward is finite, and its derivative is not, in any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampwise.numerics.explain import mask_constant
from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe.ancestry import Ancestor, back_from
from ampwise.numerics.observe.bits import NEGATIVE, bad_bits
from ampwise.numerics.observe.operations import FILLS, tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import counted


def _in_any_precision(root: Root, makers: Sequence[Ancestor | None]) -> Explanation | None:
    if root.place.phase != "backward":
        return None
    return _mask_times_zero(root, makers) or Explanation(
        "BACKWARD_SINGULARITY",
        f"Forward is finite here, but its derivative is not: {root.name} in backward divides "
        "by zero, or multiplies zero by infinity, in any precision. A branch that `where` does "
        "not take is differentiated all the same.",
    )


def _mask_times_zero(root: Root, makers: Sequence[Ancestor | None]) -> Explanation | None:
    """The -inf of a mask, times a gradient of 0: where something that is learned scales it."""
    given = tensors(root.args)
    if root.name != "mul" or len(makers) != len(given):
        return None
    masks = [(each, maker) for each, maker in zip(given, makers, strict=True)
             if bad_bits(each) == NEGATIVE]  # fmt: skip
    if len(masks) != 1:
        return None
    mask, maker = masks[0]
    fill = next((each for each in back_from(maker) if each.name in FILLS), None)
    count = int(torch.isneginf(mask).sum())
    made = f"made on line {fill.place.line}, " if fill is not None else ""
    return Explanation(
        "BACKWARD_SINGULARITY",
        f"{counted(count, 'element')} of -inf, {made}{'is' if count == 1 else 'are'} a factor on "
        f"line {root.place.line}: the gradient of the other factor is 0 times -inf, which is NaN, "
        "in any precision. Mask after the scaling, or with a finite number.",
        fill,
    )


def _safe_argument(fault: Fault) -> Candidate:
    place = fault.place
    return Candidate(
        "keep the argument away from the singularity",
        f"line {place.line}: give the function a safe argument, torch.where(bad, 0.5, x), "
        "and put what it gave for the bad ones back after it, without a gradient",
        on(Scope(place.file, place.line), change.away_from_singularities()),
    )


def _remedies(fault: Fault) -> list[Candidate]:
    first = mask_constant.finite(fault) if fault.op in FILLS else _safe_argument(fault)
    wider = fault.in_float32() if fault.step.policy.autocast else []
    return [first, *wider, *fault.in_bfloat16()]


CAUSE = Cause("BACKWARD_SINGULARITY", _remedies, in_any_precision=_in_any_precision)
