"""How messages count."""

from __future__ import annotations


def counted(number: int | str, one: str, several: str = "") -> str:
    """``1 step``, ``2 steps``, ``1,797 samples``; `several` where an ``s`` does not make it."""
    shown = number if isinstance(number, str) else f"{number:,}"  # a word where nobody counted
    return f"{shown} {one if number == 1 else several or f'{one}s'}"
