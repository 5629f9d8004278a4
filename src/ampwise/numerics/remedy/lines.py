"""Lines of a source, as diffs count them."""

from __future__ import annotations


def lines_of(text: str) -> list[str]:
    """Lines with their ends, as git counts them: a form feed ends none."""
    parts = text.split("\n")
    return [f"{each}\n" for each in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
