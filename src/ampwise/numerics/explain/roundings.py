"""What a rounding does to values, in words: how coarsely it keeps which, and what is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise import formats
from ampwise.data import leaves
from ampwise.numerics.explain.lost import Lost
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.extent import extent_of, samples_in
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.range_losses import Part, RangeLoss
from ampwise.numerics.observe.shadow import shadow
from ampwise.numerics.result import CauseName, percent
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import counted, figure

_DIFFERENCES = ("sub", "add", "mean", "sum", "var", "addmm", "rsub", "native_layer_norm",
                "native_batch_norm", "var_mean")  # fmt: skip

TURNS = ("sin", "cos", "tan")

GROWS = ("cumprod", "prod", "pow", "exp", "exp2", "expm1")
"""Operations that make a small relative, or absolute, error of an argument a large one."""

_SUMS = ("add", "add_", "sub", "sub_", "rsub")
_COARSE = 4.0
"""Spacings that a term has to be larger than, to come through a sum."""

_CAUSE: dict[Part, CauseName] = {"overflow": "RANGE_OVERFLOW", "underflow": "UNDERFLOW"}


def out_of_range_words(lost: RangeLoss) -> str:
    """Which results of an operation became inf, or 0, or lost digits as subnormal numbers."""
    fmt = formats.lookup(lost.dtype)
    of = lost.lost.numel()
    some = "All" if lost.elements == of > 1 else f"{lost.elements:,} of"
    which = f"{some} {counted(of, 'result')} of {lost.name} on line {lost.place.line}"
    if lost.part == "overflow":
        ends = f"{fmt} ends at {figure(fmt.max)}"
        return f"{which} become inf: they should be up to {figure(lost.most)}, and {ends}"
    if lost.zeros == lost.elements:
        ends = f"the smallest number of {fmt} is {fmt.min_subnormal:.2g}"
        return f"{which} become 0: they should be up to {figure(lost.most)}, and {ends}"
    ends = f"the normal numbers of {fmt}, which end at {fmt.min_normal:.2g}"
    return f"{which} fall below {ends}: {lost.zeros:,} become 0, and the others lose digits"


def left_range(lost: RangeLoss, stash: Stash) -> Lost:
    """The fault that numbers became inf, or 0."""
    batches = [each for batch in stash.micro_batches for _, each in leaves(batch.batch)]
    return Lost(_CAUSE[lost.part], out_of_range_words(lost), lost.place, lost.name, lost.dtype,
                severe=True, extent=extent_of(lost.lost, samples_in(batches)))  # fmt: skip


def off_by(kept_db: float) -> str:
    """How large an error is, from an SQNR: ``3.2%``; of one that is larger, how many times."""
    if kept_db == -math.inf:
        return "an unbounded factor"
    error = 10 ** (-kept_db / 20)
    if error >= 2:
        return f"{figure(float(f'{error:.2g}'))} times its size"
    return percent(error, 0 if error >= 0.1 else 1)


def kept(dtype: str, most: float) -> str:
    """How coarsely numbers up to one are kept; all that are smaller are not kept more coarsely."""
    fmt = formats.lookup(dtype)
    spacing = fmt.ulp(math.nextafter(most, 0))
    return f"{figure(most)} is kept in {fmt} at a spacing of {figure(spacing)}"


@dataclass(frozen=True)
class Began:
    """How an operation rounds, in words.

    Attributes
    ----------
    absorbs
        Whether it is a sum whose small terms are lost beside large ones.
    """

    words: str
    absorbs: bool = False

    def cause(self, shows: str) -> CauseName:
        """What it is, where an operation of that name shows it."""
        return "CANCELLATION" if subtracts(shows) and not self.absorbs else "PRECISION_LOSS"


def began(step: Replayable, stash: Stash, error: OperationError) -> Began | None:
    """How an operation rounds: small terms of a sum away, or its result; None if not known."""
    at = (error.name, error.place, error.occurrence)
    actual = shadow(step, stash, errors=False, at=at).actual
    if actual is None or error.func is None:
        return None
    try:
        made = exact(error.func, *actual)[0]
    except UnsupportedError:
        return None
    if not made.numel() or not bool(made.isfinite().all()):
        return None
    most = max(map(float, torch.aminmax(made)), key=abs)
    lost = absorbed(error, *actual) if error.name in _SUMS else ""
    return Began(lost, absorbs=True) if lost else rounds(error, most)


def rounds(by: OperationError | Ancestor, most: float) -> Began:
    """How coarse the largest result of an operation is."""
    return Began(f"{by.name} on line {by.place.line} rounds: {kept(by.dtype, most)}")


def absorbed(error: OperationError, args: Any, kwargs: Any) -> str:
    """Which small terms a sum in 16 bits loses beside large ones; empty where it loses none."""
    fmt, alpha = formats.lookup(error.dtype), abs(float(kwargs.get("alpha", 1)))
    sizes = [_size(args[0]), alpha * _size(args[1])]
    small, large = sorted(sizes)
    spacing = fmt.ulp(large) if large else 0.0
    if not 0 < small < _COARSE * spacing:
        return ""
    terms = [_about(size, args) for size in sizes]
    if "sub" in error.name:
        taken, of = terms if error.name == "rsub" else terms[::-1]
        does = f"subtracts {taken} from {of}"
    else:
        first, second = terms if sizes[0] == small else terms[::-1]
        does = f"adds {first} to {second}"
    away = "most of the smaller are rounded away"
    lost = away if small < spacing / 2 else "few digits of the smaller are left"
    return (
        f"{error.name} on line {error.place.line} {does}, where {fmt} has a spacing of "
        f"{figure(spacing)}: {lost}"
    )


def _about(size: float, args: Any) -> str:
    """A number of the code, or the size that those of a tensor have."""
    numbers = [abs(each) for each in args[:2] if isinstance(each, int | float)]
    return figure(size) if size in numbers else f"numbers of about {figure(size)}"


def _size(term: Any) -> float:
    """The typical magnitude of a term: the median of those that are not 0."""
    if not isinstance(term, Tensor):
        return abs(float(term))
    sizes = term.detach().double().abs().flatten()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    return float(torch.median(sizes)) if sizes.numel() else 0.0


def showing(error: OperationError, seen_from: Place) -> str:
    """What an operation makes of the errors of what it is given."""
    where = f"{error.name} on {error.place.line_from(seen_from)}"
    off = f"off by {off_by(error.propagated_db)}"
    if error.name in TURNS:
        return (
            f"{where}, which repeats every 6.28, takes what is made of it for an angle, and is "
            f"{off}"
        )
    if error.name in GROWS:
        return f"{where} makes a small error large: it is {off}"
    if subtracts(error.name):
        size = figure(error.exact_amax)
        return f"{where} takes a difference of at most {size} of such numbers, and is {off}"
    return f"{where}, in {error.dtype}, only shows it: it is {off}"


def subtracts(name: str) -> bool:
    """Whether an operation may take the difference of nearly equal numbers."""
    return any(word in name for word in _DIFFERENCES)
