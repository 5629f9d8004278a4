"""PRECISION_LOSS: finite, but wrong against the float64 shadow."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise import formats
from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.explain.roundings import off_by, subtracts
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.draws import count
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.roots import Root
from ampwise_lint.base.words import counted, figure

_MOST = 0.5
"""Share of a result, by norm, that became 0, from which on it is an underflow."""


def _by_argument(argument: Argument) -> Explanation | None:
    """Arguments that were rounded to the end of a domain."""
    if argument.what != "edge":
        return None
    many, fmt = counted(len(argument.actual), "argument"), argument.fmt
    return Explanation(
        "PRECISION_LOSS",
        f"{many} of {argument.root.name} rounded to {figure(float(argument.actual[0]))}, which is "
        f"the end of its domain, and should be {figure(float(argument.wanted[0]))}. {fmt} keeps "
        f"{fmt.mantissa_bits + 1} bits.",
    )


def somewhere(root: Root) -> Explanation:
    """Inputs that are wrong, in no way that is known."""
    return Explanation(
        "PRECISION_LOSS",
        f"The inputs of {root.name} lost so much that it has no finite value for them. In float64 "
        "the same computation is finite throughout.",
    )


def decided(root: Root, errors: Sequence[OperationError]) -> Explanation:
    """Values that are not finite in float64 either, and that rounding made the code take.

    Parameters
    ----------
    errors
        Of the step's operations, in order.
    """
    line, which = f"line {root.place.line}", f"a value that is not finite ({root.name})"
    taken = f"{line} takes {which}, to which float64 does not come"
    before = (each for each in errors if each.index < root.index and each.enlarges)
    if (first := next(before, None)) is None:
        words = f"Decided by what was rounded before, {taken}."
        return Explanation("PRECISION_LOSS", words)
    off = f"off by {off_by(first.propagated_db)}, its inputs by {off_by(first.inputs_db)}"
    made_by = Ancestor(
        first.name, first.place, first.dtype, first.inputs_db, first.propagated_db, (), ()
    )
    cancels = subtracts(first.name)
    gives = "subtracts nearly equal numbers: its result is" if cancels else "gives a result that is"
    return Explanation(
        "CANCELLATION" if cancels else "UNDERFLOW" if first.flushed > _MOST else "PRECISION_LOSS",
        f"{made_by.where(root.place)} {gives} {off}. By that, {taken}.",
        made_by,
    )


def of_a_draw(root: Root, draw: Ancestor) -> Explanation:
    """A number that was drawn in 16 bits, at the end of the interval."""
    fmt = formats.lookup(draw.dtype)
    often = f"{count(fmt):,}"
    return Explanation(
        "PRECISION_LOSS",
        f"{draw.where(root.place)} draws in {fmt}, which has {often} numbers from 0 to 1: the "
        f"lowest comes once in {often} draws, and {root.name} on line {root.place.line} has no "
        f"finite value for it. In float32 it comes once in {count(formats.FLOAT32):,}.",
        draw,
    )


CAUSE = Cause(
    "PRECISION_LOSS", Fault.in_another_precision, by_argument=_by_argument, of_precision=True
)
