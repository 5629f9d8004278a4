"""MASK_CONSTANT: a constant of the code, to fill or mask with, that the format does not hold."""

from __future__ import annotations

import math

from ampwise import formats
from ampwise.numerics.explain.cause import Cause, Explanation, Fault, format_of, in_float64
from ampwise.numerics.observe.bits import all_bits, extreme_of
from ampwise.numerics.observe.operations import FILLS, tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import figure


def _by_itself(root: Root) -> Explanation | None:
    fmt = format_of(root)
    constant = beyond(root, fmt)
    local = None if constant is None else in_float64(root)
    if constant is None or local is None or all_bits(local) or abs(extreme_of(local)) < fmt.max:
        return None
    return Explanation(
        "MASK_CONSTANT",
        f"The constant {figure(constant)} is beyond {fmt}, which ends at {fmt.max:,.0f}, and "
        f"becomes {'-inf' if constant < 0 else 'inf'}. In float32 it is finite.",
    )


def refused(root: Root, compute_dtype: str, message: str) -> Explanation | None:
    """A constant that float16 does not hold, which an operation raised an error about."""
    constant = beyond(root, formats.lookup("float16"))
    if constant is None:
        return None
    return Explanation(
        "MASK_CONSTANT",
        f"The constant {figure(constant)} does not fit into {compute_dtype}, and {root.name} "
        f"raises {message}. In float32 it is finite.",
    )


def beyond(root: Root, fmt: formats.FloatFormat) -> float | None:
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


def finite(fault: Fault) -> Candidate:
    """A constant that the format has."""
    place = fault.place
    most = formats.lookup(fault.step.policy.compute_dtype).max
    return Candidate(
        "mask with a number that the format has",
        f"line {place.line}: write torch.finfo(x.dtype).min for the constant, or .max if it is "
        "positive",
        on(Scope(place.file, place.line), change.constants(0.0, most)),
    )


def _remedies(fault: Fault) -> list[Candidate]:
    return [finite(fault), *fault.in_another_precision()]


CAUSE = Cause("MASK_CONSTANT", _remedies, by_itself=_by_itself, of_precision=True)
