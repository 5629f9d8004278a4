"""What is lost where a tensor is rounded to float8: it is a matter of its scale.

A tensor is multiplied by a scale, rounded, and divided by it again later. With the scale too large
values lie beyond the format (e4m3 ends at 448 and has no inf), with the scale too small, or one
value of it much larger than the others, most become 0. Either is finite, and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from ampwise import formats
from ampwise.numerics.observe.operation_errors import OperationError
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.result import CauseName, percent
from ampwise_lint.base.words import figure

FORMATS = (formats.FLOAT8_E4M3FN, formats.FLOAT8_E5M2)

_BEYOND = 0.001
"""Share of values beyond a format from which on it counts."""
_ZEROS = 0.25
"""Share of values that become 0 from which on it counts: a few always do."""


def is_float8(dtype: str) -> bool:
    """Whether a dtype is one of float8, by its name."""
    return any(dtype == each.name for each in FORMATS)


def worst_cast(errors: Iterable[OperationError]) -> tuple[OperationError, CauseName, str] | None:
    """The cast to float8 that loses most, the cause and the words; None if none loses much."""
    casts = [each for each in errors if each.name == "_to_copy" and is_float8(each.dtype)]
    if not casts:
        return None
    worst = max(casts, key=lambda each: each.beyond)
    if worst.beyond > _BEYOND:
        return worst, "RANGE_OVERFLOW", _saturates(worst)
    worst = max(casts, key=lambda each: each.zeros)
    return (worst, "UNDERFLOW", _flushes(worst)) if worst.zeros > _ZEROS else None


def _saturates(cast: OperationError) -> str:
    fmt = formats.lookup(cast.dtype)
    return (
        f"{percent(cast.beyond)} of the values that are rounded to {fmt} lie beyond it, up to "
        f"{figure(cast.exact_amax)}: it saturates, and they become {figure(fmt.max)}. "
        f"{scale_that_fits(fmt, cast.exact_amax)}"
    )


def _flushes(cast: OperationError) -> str:
    fmt = formats.lookup(cast.dtype)
    return (
        f"{percent(cast.zeros)} of the values that are rounded to {fmt} become 0. They share a "
        f"scale with one that it takes to {figure(cast.exact_amax)}, and are more than "
        f"{figure(2 * cast.exact_amax / fmt.min_subnormal)} times smaller: below half of the "
        f"smallest number of {fmt}, {fmt.min_subnormal:.2g}"
    )


def scale_that_fits(fmt: formats.FloatFormat, peak: float) -> str:
    """What to say of a tensor that a format of float8 cannot hold."""
    return (
        f"A scale of {abs(fmt.max / peak):.3g}, which takes the largest to {figure(fmt.max)}, fits "
        "all of it into the format"
    )


def as_a_scale(root: Root) -> str:
    """What to say of a number that scales a tensor into float8, and is inf or NaN; empty else."""
    if not root.scales:
        return ""
    return (
        f" It scales a tensor into {root.scales}: keep scales in float32, and the largest "
        "magnitude that they divide by above 0, as in amax.float().clamp(min=1e-12)."
    )
