"""How messages count, and write numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable


def counted(number: int | str, one: str, several: str = "") -> str:
    """``1 step``, ``2 steps``, ``1,797 samples``; `several` where an ``s`` does not make it."""
    shown = number if isinstance(number, str) else f"{number:,}"  # a word where nobody counted
    return f"{shown} {one if number == 1 else several or f'{one}s'}"


def joined(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; nothing of nothing."""
    *most, last = [*names] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def size_unit(largest_bytes: float) -> tuple[str, float]:
    """The unit that sizes up to this one are put in, and its bytes."""
    return ("MB", 1e6) if largest_bytes >= 1e6 else ("kB", 1e3)


def size(count: float) -> str:
    """A number of bytes, as ``12.3 MB``, or in kB where that would be less than one."""
    unit, one = size_unit(count)
    return f"{count / one:,.1f} {unit}"


def power(value: float) -> str:
    """``2^24``: a power of two as people write it, small ones and other numbers plainly."""
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5 or -4 < exponent < 12:
        return f"{value:g}"
    return f"2^{exponent - 1}"


def power_in_code(value: float) -> str:
    """``2.0**24``: the same as one writes it in Python."""
    return power(value).replace("^", ".0**")


def figure(value: float) -> str:
    """A number with its sign, as people write it: ``-102,400``, ``0.0316``, ``1.2e-7``, ``1e9``."""
    text = f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.4g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
