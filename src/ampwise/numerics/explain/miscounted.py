"""Positions or counters beyond the integers that a format holds."""

from __future__ import annotations

import math

from ampwise import formats
from ampwise.numerics.explain.lost import Lost, note
from ampwise.numerics.observe.shadow import ShadowRun
from ampwise.numerics.result import CauseName

_ADDS_UP = ("index_add", "scatter_add", "index_put", "scatter_reduce")


def rounded_integers(run: ShadowRun, damage: str) -> list[Lost]:
    """Positions or counters beyond the integers that the format holds.

    A fault where something becomes wrong by them, such as the cosine of a position or an index. The
    length that a mean divides by may be rounded as any other number.
    """
    harm = bool(damage) or any(each.miscounted for each in run.errors)
    for each in run.errors:
        if each.integers and each.place.phase == "forward":
            fmt = formats.lookup(each.dtype)
            most = 2 ** (fmt.mantissa_bits + 1)
            cause: CauseName = "PRECISION_LOSS"
            if each.exact_amax > fmt.max:
                cause = "RANGE_OVERFLOW"
                text = (
                    f"Integers (positions, counts) of up to {each.exact_amax:,.0f} are kept in "
                    f"{fmt}, which ends at {fmt.max:,.0f}: they become infinite."
                )
            elif each.name.startswith("add") and each.exact_amax <= most + 1:
                text = (
                    f"Counts stop at {most:,} in {fmt}. On line {each.place.line} {most:,} + 1 is "
                    f"{most:,} again."
                )
            elif each.name.startswith(_ADDS_UP):
                text = (
                    f"Counts of up to {each.exact_amax:,.0f} are added up in {fmt}, in which ones "
                    f"that are added one by one stop at {most:,}."
                )
            else:
                below = fmt.ulp(math.nextafter(each.exact_amax, 0))
                steps = f"steps of {fmt.ulp(most):g}"
                if below > fmt.ulp(most):
                    steps = f"{steps}, of {below:g} at the end"
                text = (
                    f"Integers (positions, counts) of up to {each.exact_amax:,.0f} are kept in "
                    f"{fmt}, which counts to {most:,} and goes on in {steps}. Neighbours become "
                    "one."
                )
            if not harm:
                return [note(f"{text} Here (line {each.place.line}) it does no harm.")]
            return [Lost(cause, text, each.place, each.name, each.dtype,
                         severe=True, extent=each.miscounts)]  # fmt: skip
    return []
