"""PRECISION_LOSS: finite, but wrong against the float64 shadow."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.observe.roots import Root
from ampwise_lint.base.words import counted, figure


def _by_argument(argument: Argument) -> Explanation | None:
    """Arguments that were rounded to the end of a domain."""
    if argument.what != "edge":
        return None
    count, fmt = counted(len(argument.actual), "argument"), argument.fmt
    return Explanation(
        "PRECISION_LOSS",
        f"{count} of {argument.root.name} rounded to {figure(float(argument.actual[0]))}, which is "
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


CAUSE = Cause(
    "PRECISION_LOSS", Fault.in_another_precision, by_argument=_by_argument, of_precision=True
)
