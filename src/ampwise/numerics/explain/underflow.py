"""UNDERFLOW: an argument that is 0 and should be a number, too small for the format."""

from __future__ import annotations

from ampwise import formats
from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.explain.eps_underflow import zeros
from ampwise.numerics.observe.ancestry import Ancestor, back_from, flushed_first
from ampwise.numerics.observe.roots import Root

_FEW = 4
"""Times the smallest number of a format below which a value counts as flushed."""


def _by_argument(argument: Argument) -> Explanation | None:
    if argument.what != "zero":
        return None
    fmt, is_and_should = argument.fmt, zeros_and_wanted(argument)
    if are_tiny(argument):
        began = _before(argument)
        in_sight = began is None or _function(began) == _function(argument.root)
        seen_from = argument.root if began is None or in_sight else began
        where = "" if began is None else f" {began.where(seen_from.place)} made them so."
        return Explanation(
            "UNDERFLOW",
            f"{is_and_should}. The smallest number of {fmt} is {fmt.min_subnormal:.2g}.{where}",
            None if in_sight else began,
        )
    lost = next((each for each in back_from(argument.maker) if each.cancels or each.flushed), None)
    if lost is None:
        on_the_way = f"something fell below the smallest number of {fmt}, {fmt.min_subnormal:.2g}"
    else:
        lost = flushed_first(lost) or lost
        theirs = formats.lookup(lost.dtype)
        on_the_way = (
            f"{lost.where(argument.root.place)} made numbers below the smallest of {theirs}, "
            f"{theirs.min_subnormal:.2g}, 0"
        )
    return Explanation("UNDERFLOW", f"{is_and_should}. On the way to them {on_the_way}.", lost)


def _function(of: Ancestor | Root) -> tuple[str, int]:
    """The function that an operation is called in."""
    return of.place.file, of.place.function


def _before(argument: Argument) -> Ancestor | None:
    """Where the zeros began, if that is another line."""
    began, root = flushed_first(argument.maker), argument.root.place
    if began is None or began.place.file_line == root.file_line:
        return None
    return began


def zeros_and_wanted(argument: Argument) -> str:
    """Zeros, and what they should be."""
    wanted = argument.wanted.abs()
    least, most = float(wanted.min()), float(wanted.max())
    span = f"{least:.3g}" if most <= 1.001 * least else f"{least:.3g} to {most:.3g}"
    return f"{zeros(argument)} and should be {span}"


def are_tiny(argument: Argument) -> bool:
    """Whether zeros should be numbers that the format cannot tell from 0 anyway."""
    return float(argument.wanted.abs().max()) <= _FEW * argument.fmt.min_subnormal


CAUSE = Cause("UNDERFLOW", Fault.in_another_precision, by_argument=_by_argument, of_precision=True)
