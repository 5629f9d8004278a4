"""Random numbers that are drawn in 16 bits: there are few of them, and the ends come up often.

A draw counts as given: where a shadow is told to, it takes the middle of what the number stands
for, as more digits might have given it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ampwise import formats
from ampwise.numerics.observe.ancestry import Ancestor, back_from

_UNIFORM = frozenset(["rand", "rand_like", "uniform", "uniform_"])


def finer(name: str, args: Any, drawn: Tensor) -> Tensor:
    """A draw with more digits, in float64, if it is one from an interval in 16 bits."""
    made = drawn.detach().double()
    fmt = formats.lookup(drawn.dtype)
    if name not in _UNIFORM or fmt.name not in formats.HALF:
        return made
    low, high = args[1:3] if name.startswith("uniform") and len(args) > 2 else (0.0, 1.0)
    return made + (high - low) / count(fmt) / 2


def count(fmt: formats.FloatFormat) -> int:
    """How many numbers between 0 and 1 torch draws in a format."""
    return 2 ** (fmt.mantissa_bits + 1)


def is_in_half(made_by: Ancestor) -> bool:
    """Whether an operation draws from an interval in 16 bits."""
    return made_by.name in _UNIFORM and made_by.dtype in formats.HALF


def drawn_in_half(makers: Iterable[Ancestor | None]) -> Ancestor | None:
    """The nearest such draw that something was made of; None where there is none."""
    before = (each for maker in makers for each in back_from(maker))
    return next(filter(is_in_half, before), None)
