"""A `Tuned` on a terminal, as Markdown and as a page."""

from __future__ import annotations

from rich.text import Text

from ampwise.report.page import cell, number, page, prose, table
from ampwise.report.table import new_table
from ampwise.tune.result import Tried, Tuned
from ampwise_lint.base.console import Console


def render(found: Tuned, console: Console) -> None:
    """Print what each precision needs, and which policy to use."""
    console.print()
    console.print(Text(f"{found.task} on {found.device}", style="bold"))
    drawn = new_table()
    drawn.add_column("precision", no_wrap=True)
    drawn.add_column("holds as", ratio=2, overflow="fold")
    drawn.add_column("gradient dB", justify="right")
    drawn.add_column("speed, vs fp32", justify="right")
    drawn.add_column("why", ratio=2)
    for each in found.tried:
        precision, policy, *rest = _cells(each)
        drawn.add_row(precision, Text(policy, style="" if each.policy else "red"), *rest)
    console.print(drawn)
    for index, sentence in enumerate(sentences(found)):
        console.print(Text(sentence, style="bold" if index == 0 else ""))


def sentences(found: Tuned) -> list[str]:
    """The verdict, or that there is none yet."""
    unfinished = [] if found.finished else ["Not finished: the search ended early."]
    return unfinished + found.verdict


def to_markdown(found: Tuned) -> str:
    """The same as a table."""
    lines = [f"# {cell(found.task)} on {cell(found.device)}", ""]
    lines += [prose(each) + "  " for each in sentences(found)]
    head = ("precision", "holds as", "gradient dB", "speed, vs fp32", "why")
    lines += ["", *table(head, map(_cells, found.tried), (2, 3))]
    return "\n".join(lines) + "\n"


def to_html(found: Tuned) -> str:
    """The same as a page."""
    rows = [_cells(each) for each in found.tried]
    standing = "pass" if any(each.policy for each in found.tried) else "fail"
    values = {"rows": rows, "standing": standing, "sentences": sentences(found)}
    return page("tune.html", found=found, **values)


def _cells(each: Tried) -> tuple[str, ...]:
    return (
        each.precision,
        each.policy or "does not hold",
        number(each.gradient_db, ".0f"),
        "" if each.speedup is None else f"{each.speedup:.2f}x",
        each.reason,
    )
