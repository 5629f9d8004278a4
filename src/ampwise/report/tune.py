"""A `Tuned` on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ampwise.numerics.search import Tuned
from ampwise.report.bench import new_table
from ampwise.report.page import number


def render(found: Tuned, console: Console) -> None:
    """Print what each precision needs, and which policy to use."""
    console.print()
    console.print(Text(f"{found.task} on {found.device}", style="bold"))
    table = new_table()
    table.add_column("precision", no_wrap=True)
    table.add_column("holds as", ratio=2, overflow="fold")
    table.add_column("gradient dB", justify="right")
    table.add_column("speed, vs fp32", justify="right")
    table.add_column("why", ratio=2)
    for each in found.tried:
        table.add_row(
            Text(each.precision),
            Text(each.policy or "does not hold", style="" if each.policy else "red"),
            number(each.gradient_db, ".0f"),
            "" if each.speedup is None else f"{each.speedup:.2f}x",
            Text(each.reason),
        )
    console.print(table)
    for index, sentence in enumerate(found.verdict):
        console.print(Text(sentence, style="bold" if index == 0 else ""))
