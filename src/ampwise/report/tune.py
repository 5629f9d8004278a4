"""A `Tuned` on a terminal, as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ampwise.report.page import cell, number, page, prose, table
from ampwise.report.table import new_table
from ampwise.stats import Interval
from ampwise.tune.result import Credit, Measured, Settings, Tried, Tuned
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import size


@dataclass(frozen=True)
class Grid:
    """A table of a report.

    Attributes
    ----------
    name, title
        In the page: its id, and what stands above it.
    figures
        Columns that stand at the right.
    """

    name: str
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figures: tuple[int, ...]
    caption: str = ""


def render(found: Tuned, console: Console) -> None:
    """Print what was measured, and what to use."""
    console.print()
    console.print(Text(f"{found.task} on {found.device}", style="bold"))
    for grid in grids(found):
        drawn = new_table()
        for place, name in enumerate(grid.head):
            figure = place in grid.figures
            drawn.add_column(
                name,
                justify="right" if figure else "left",
                overflow="fold",
                ratio=None if figure or not place else 2,
            )
        for row in grid.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    for index, sentence in enumerate(sentences(found)):
        console.print(Text(sentence, style="bold" if index == 0 else ""))


def sentences(found: Tuned) -> list[str]:
    """The verdict, or that there is none yet."""
    unfinished = [] if found.finished else ["Not finished: the search ended early."]
    return unfinished + found.verdict


def to_markdown(found: Tuned) -> str:
    """The same as tables."""
    lines = [f"# {cell(found.task)} on {cell(found.device)}", ""]
    lines += [prose(each) + "  " for each in sentences(found)]
    for grid in grids(found):
        lines += ["", *table(grid.head, grid.rows, grid.figures)]
    return "\n".join(lines) + "\n"


def to_html(found: Tuned) -> str:
    """The same as a page."""
    standing = "pass" if found.settings or any(each.policy for each in found.tried) else "fail"
    values = {"grids": grids(found), "standing": standing, "sentences": sentences(found)}
    return page("tune.html", found=found, **values)


def grids(found: Tuned) -> list[Grid]:
    """What was measured, as tables."""
    if found.settings is None:
        return [_held(found)]
    settings = found.settings
    shown = [_precisions(settings)]
    shown += [_islands(settings)] if settings.islands_searched else []
    return shown + ([_levers(settings)] if settings.credits else [])


def _held(found: Tuned) -> Grid:
    return Grid(
        "tried",
        "Precisions",
        ("precision", "holds as", "gradient dB", "speed, vs fp32", "why"),
        [_tried(each) for each in found.tried],
        (2, 3),
        "A precision holds when replayed steps are finite, close to float64, and gradients keep "
        f"{found.least_db} dB of SQNR; what it holds as names the modules that stay in float32.",
    )


def _tried(each: Tried) -> tuple[str, ...]:
    return (
        each.precision,
        each.policy or "does not hold",
        number(each.gradient_db, ".0f"),
        "" if each.speedup is None else f"{each.speedup:.2f}x",
        each.reason,
    )


def _precisions(settings: Settings) -> Grid:
    result = [each for each in (settings.refused, settings.chosen) if each is not None]
    named = [each.setting for each in result]
    others = [each for each in settings.precisions if each.setting not in named]
    rows = [_measured(each) for each in (*others, *result)]
    return Grid(
        "precisions",
        "Precisions, and the result",
        ("setting", f"{settings.unit}/s, vs fp32", "peak memory"),
        rows,
        (1, 2),
        "Median and 95 % interval of paired ratios, in turns; exact peaks of whole steps.",
    )


def _measured(each: Measured) -> tuple[str, ...]:
    peak = "" if each.peak_memory_bytes is None else size(each.peak_memory_bytes)
    saved = "" if each.memory_reduction is None else f" ({-each.memory_reduction:+.0%})"
    return (each.setting, str(each.speedup or each.reason), peak + saved)


def _levers(settings: Settings) -> Grid:
    return Grid(
        "levers",
        "Levers",
        ("lever", "alone", "on top of those chosen", "chosen"),
        [_credit(each) for each in settings.credits],
        (),
        f"Beside {settings.credits[0].beside} without it, and beside those chosen before it: "
        "samples a second, or the share of the peak memory.",
    )


def _credit(each: Credit) -> tuple[str, ...]:
    alone = _gain(each.alone, each.memory_alone)
    together = _gain(each.together, each.memory_together)
    if not alone:
        return (each.lever, each.reason, "", "")
    return (each.lever, alone, together or each.reason, "yes" if each.chosen else "")


def _gain(ratio: Interval | None, saved: float | None) -> str:
    memory = "" if saved is None else f"{-saved:+.0%} memory"
    return ", ".join(each for each in ("" if ratio is None else str(ratio), memory) if each)


def _islands(settings: Settings) -> Grid:
    return Grid(
        "islands",
        "Faster in float32",
        ("what (times)", "in 16 bits", "in float32", "whole step", "chosen"),
        [
            (
                f"{each.pattern} ({each.times})",
                f"{each.low_ms:.3g} ms",
                f"{each.float32_ms:.3g} ms",
                "not tried" if each.together is None else str(each.together),
                "yes" if each.chosen else "",
            )
            for each in settings.islands
        ]
        or [("none", "", "", "", "")],
        (1, 2),
        "One of them, forward and backward by itself; then the whole step with all of them in "
        "float32.",
    )
