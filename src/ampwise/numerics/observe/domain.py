"""Functions that are not defined everywhere: where they are, and who is outside.

``acos`` ends at 1, ``log`` begins after 0. An argument beyond has no value in any precision, and at
an open end (the root at 0, say) the derivative is infinite, so a clamp stays inside by a little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ampwise_lint.base.words import counted, figure, joined


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a function has finite values.

    Attributes
    ----------
    closed
        Whether it has one at the ends, too.
    """

    low: float
    high: float
    closed: bool

    def outside(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Which values lie below it, and which above."""
        if self.closed:
            return values < self.low, values > self.high
        return values <= self.low, values >= self.high

    def bounds(self, dtype: torch.dtype) -> tuple[float | None, float | None]:
        """The numbers of a format that are just inside of its ends; None where it is unbounded."""
        info = torch.finfo(dtype)
        low = None if math.isinf(self.low) else self.low + (info.eps if self.low else info.tiny)
        high = None if math.isinf(self.high) else self.high - info.eps
        return low, high

    def __str__(self) -> str:
        low, high = (f"{each:g}" for each in (self.low, self.high))
        if math.isinf(self.high):
            return f"from {low} on" if self.closed else f"above {low}"
        return f"from {low} to {high}" if self.closed else f"between {low} and {high}"


_ROOT, _LOG = Domain(0.0, math.inf, closed=True), Domain(0.0, math.inf, closed=False)
_ARC, _OPEN = Domain(-1.0, 1.0, closed=True), Domain(-1.0, 1.0, closed=False)

DOMAINS = {
    "sqrt": _ROOT, "rsqrt": _LOG, "log": _LOG, "log2": _LOG, "log10": _LOG, "lgamma": _LOG,
    "log1p": Domain(-1.0, math.inf, closed=False), "acos": _ARC, "asin": _ARC, "arccos": _ARC,
    "arcsin": _ARC, "atanh": _OPEN, "arctanh": _OPEN, "erfinv": _OPEN,
    "acosh": Domain(1.0, math.inf, closed=True), "logit": Domain(0.0, 1.0, closed=False),
    "special_logit": Domain(0.0, 1.0, closed=False),
}  # fmt: skip
"""Of functions by the name of their operation."""


def domain_of(name: str) -> Domain | None:
    """The domain of an operation, in place or not; None where it is everywhere, or not known."""
    return DOMAINS.get(name.removesuffix("_"))


def in_words(name: str, values: Tensor) -> str:
    """``acos is defined from -1 to 1: 3 of 8 arguments are above, up to 1.001``; else empty."""
    domain = domain_of(name)
    if domain is None or not values.is_floating_point():
        return ""
    values = values.detach().double()
    below, above = domain.outside(values)
    parts: list[str] = []
    for which, side, end, worst in (
        (below, "below", domain.low, torch.amin),
        (above, "above", domain.high, torch.amax),
    ):
        count = int(which.sum())
        if not count:
            continue
        most = float(worst(values[which]))
        are = f"{count:,} of {counted(values.numel(), 'argument')} {'is' if count == 1 else 'are'}"
        reach = "down" if side == "below" else "up"
        parts.append(
            f"{are} {end:g}" if most == end else f"{are} {side}, {reach} to {figure(most)}"
        )
    return f"{name} is defined {domain}: {joined(parts)}" if parts else ""


def inside(name: str, values: Tensor) -> Tensor:
    """Values clamped into the domain of an operation."""
    domain = domain_of(name)
    if domain is None or not values.is_floating_point():
        return values
    low, high = domain.bounds(values.dtype)
    return values.clamp(min=low, max=high)
