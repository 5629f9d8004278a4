"""How messages speak of ranks."""

from __future__ import annotations

from collections.abc import Iterable


def spell(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0, 2-7``; runs from three on are drawn together."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(each) for each in run]
    if len(numbers) == 1:
        return f"rank {parts[0]}"
    return "ranks " + (" and ".join(parts) if len(parts) == 2 else ", ".join(parts))
