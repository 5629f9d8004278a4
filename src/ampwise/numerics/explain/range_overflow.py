"""RANGE_OVERFLOW: a result that is finite in float64, and beyond the format."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ampwise import formats
from ampwise.data.move import changed, leaves
from ampwise.numerics.explain import exponentials, float8
from ampwise.numerics.explain.cause import (
    Argument,
    Cause,
    Explanation,
    Fault,
    format_of,
    in_float64,
)
from ampwise.numerics.explain.underflow import zeros_and_wanted
from ampwise.numerics.observe.ancestry import back_from
from ampwise.numerics.observe.bits import all_bits, extreme_of
from ampwise.numerics.observe.operations import tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise_lint.base.words import figure, power

_UNIT = 256.0
"""What a value that overflows is divided by: it may then be as large as 1.6e7."""

_LARGE_INPUT = 256.0
"""Inputs above this may be the reason that something overflows."""


def _by_itself(root: Root) -> Explanation | None:
    """Local result finite: the format could not hold it, or an intermediate of it."""
    local = in_float64(root)
    if local is None or all_bits(local):
        return None
    fmt, peak = format_of(root), extreme_of(local)
    if abs(peak) > fmt.max:
        scaled = f" {float8.scale_that_fits(fmt, peak)}." if float8.is_float8(fmt.name) else ""
        return Explanation(
            "RANGE_OVERFLOW",
            f"The result of {root.name} would be {figure(peak)}; {fmt} ends at "
            f"{figure(math.copysign(fmt.max, peak))}. Its inputs are finite, the largest "
            f"{figure(extreme_of(tensors((root.args, root.kwargs))))}.{scaled}",
        )
    return Explanation(
        "RANGE_OVERFLOW",
        f"Inside {root.name} an intermediate went beyond {fmt}, which ends at {figure(fmt.max)}. "
        f"The result itself, {figure(peak)}, would fit.",
    )


def _by_argument(argument: Argument) -> Explanation | None:
    """Zeros that are what an infinity before them left of a number."""
    if argument.what != "zero":
        return None
    before = back_from(argument.maker)
    lost = next((e for e in before if e.overflowed or e.cancels or e.flushed or e.lost), None)
    while lost is not None and (first := next((e for e in lost.parents if e.overflowed), None)):
        lost = first
    if lost is None or not lost.overflowed:
        return None
    fmt = formats.lookup(lost.dtype)
    return Explanation(
        "RANGE_OVERFLOW",
        f"{zeros_and_wanted(argument)}: {lost.where(argument.root.place)} gives inf, where it "
        f"would be {figure(lost.overflowed)}, as {fmt} ends at {figure(fmt.max)}.",
        lost,
    )


def _remedies(fault: Fault) -> list[Candidate]:
    found = [*exponentials.smaller_argument(fault), *fault.in_float32()]
    if fault.step.policy.compute_dtype == "float16":
        found += _other_unit(fault.place) + _smaller_input(fault.stash)
    return [*found, *fault.in_bfloat16()]


def _other_unit(place: Place) -> list[Candidate]:
    """Where the value is divided later anyway: divide before, and carry it in a larger unit."""
    if not place.file or place.phase != "forward":
        return []
    scope = Scope(place.file, place.line)

    def around() -> AbstractContextManager[Any]:
        carried = change.OtherUnit(_UNIT)
        return change.InScope(scope, carried.inside, carried.outside)

    return [
        Candidate(
            "carry the value in a larger unit",
            f"line {place.line}: divide the first factor by {_UNIT:g}, and multiply by it again "
            "where the value is scaled down, or in float32 before it is used otherwise",
            around,
            otherwise=True,
        )
    ]


def _smaller_input(stash: Stash) -> list[Candidate]:
    """Inputs that are large numbers themselves, in a unit in which they are about 1."""
    peaks: dict[str, float] = {}
    for each in stash.micro_batches:
        for path, tensor in leaves(each.batch):
            if tensor.is_floating_point() and tensor.numel():
                peaks[path] = max(peaks.get(path, 0.0), float(tensor.detach().abs().max()))
    large = {path: 2.0 ** math.ceil(math.log2(peak)) for path, peak in peaks.items()
             if _LARGE_INPUT < peak < math.inf}  # fmt: skip
    if not large:
        return []
    unit = max(large.values())

    def smaller(tensor: Any) -> Any:
        shrinks = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel()
        return tensor / unit if shrinks and float(tensor.abs().max()) > _LARGE_INPUT else tensor

    named = ", ".join(f"{path} (up to {figure(peaks[path])})" for path in large)
    return [
        Candidate(
            "a smaller input",
            f"divide {named} by {power(unit)} where the data is made; the model then trains on "
            "these numbers",
            change=lambda batch: changed(batch, smaller),
            otherwise=True,
        )
    ]


CAUSE = Cause(
    "RANGE_OVERFLOW", _remedies, by_itself=_by_itself, by_argument=_by_argument, of_precision=True
)
