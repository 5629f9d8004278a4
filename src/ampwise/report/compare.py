"""Two stored bench runs of one task: what became slower, larger or worse.

The runs were not made in turns, so their step times are compared as they are, with intervals that
know nothing of the machine's drift between the runs; ratios to each run's own float32 are, and they
are what a regression is judged by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rich.text import Text

from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.document import Document
from ampwise.errors import UsageError
from ampwise.report.table import new_table
from ampwise.stats import Interval
from ampwise.telemetry.environment import named
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted

TOLERANCE = 0.02
"""Changes smaller than this are none."""


@dataclass(frozen=True)
class Change:
    """One figure of one precision, before and after.

    Attributes
    ----------
    ratio
        After over before, with its 95 % interval where there is one.
    regression
        Whether it is worse, beyond doubt and by more than `TOLERANCE`.
    """

    precision: str
    figure: str
    before: float
    after: float
    ratio: Interval | None
    regression: bool


@dataclass
class Comparison(Document):
    """What changed between two runs; `only_in` names precisions that one of them lacks."""

    schema = "ampwise.compare/1"

    task: str
    before: str
    after: str
    changes: list[Change] = field(default_factory=list[Change])
    only_in: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def regressions(self) -> list[Change]:
        """What became worse."""
        return [each for each in self.changes if each.regression]


def compare(before: BenchReport, after: BenchReport, names: tuple[str, str]) -> Comparison:
    """Compare two reports, the older first.

    Raises
    ------
    UsageError
        When they are of different tasks.
    """
    if before.task != after.task:
        raise UsageError(
            f"{names[0]} is of task {before.task}, {names[1]} of {after.task}: expected two runs "
            "of one task"
        )
    found = Comparison(before.task, *names)
    old = {each.name: each for each in before.precisions}
    new = {each.name: each for each in after.precisions}
    found.only_in = sorted(old.keys() ^ new.keys())
    machines = [named(each.environment)["device_name"] for each in (before, after)]
    if machines[0] != machines[1]:
        found.notes.append(f"different machines: {machines[0]} and {machines[1]}")
    for name, each in old.items():
        if name in new:
            found.changes += _changes(each, new[name])
    return found


def render(comparison: Comparison, console: Console) -> None:
    """Print the changes, regressions marked."""
    table = new_table()
    table.add_column("precision", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for each in ("before", "after", "after / before"):
        table.add_column(each, justify="right", no_wrap=True)
    table.add_column("")
    for each in comparison.changes:
        table.add_row(
            each.precision,
            each.figure,
            f"{each.before:,.4g}",
            f"{each.after:,.4g}",
            str(each.ratio or ""),
            Text("worse", style="red") if each.regression else "",
        )
    console.print(Text(f"{comparison.task}: {comparison.before}, then {comparison.after}"))
    console.print(table)
    for note in comparison.notes:
        console.print(Text(note))
    for name in comparison.only_in:
        console.print(Text(f"{name}: in one of the runs only"))
    console.print(Text(counted(len(comparison.regressions), "regression"), style="bold"))


def _changes(old: PrecisionResult, new: PrecisionResult) -> list[Change]:
    found: list[Change] = []
    if old.speedup and new.speedup and _positive(old.speedup, new.speedup):
        ratio = _ratio(old.speedup, new.speedup)
        worse = ratio.high < 1 - TOLERANCE
        found.append(
            Change(old.name, "speed, vs fp32", old.speedup.median, new.speedup.median, ratio, worse)
        )
    if old.step_ms and new.step_ms and _positive(old.step_ms, new.step_ms):
        ratio = _ratio(old.step_ms, new.step_ms)
        before, after = old.step_ms.median, new.step_ms.median
        found.append(Change(old.name, "step ms", before, after, ratio, False))
    if old.peak_memory_bytes and new.peak_memory_bytes:
        size = new.peak_memory_bytes / old.peak_memory_bytes
        before, after = old.peak_memory_bytes / 1e6, new.peak_memory_bytes / 1e6
        exact = Interval(size, size, size)
        found.append(Change(old.name, "peak MB", before, after, exact, size > 1 + TOLERANCE))
    if old.accuracy and new.accuracy and "difference" in old.accuracy:
        before, after = (
            float(each.get("difference") or 0) for each in (old.accuracy, new.accuracy)
        )
        worse = old.accuracy.get("equivalent") is True and new.accuracy.get("equivalent") is False
        name = f"{old.accuracy['metric']}, vs fp32"
        found.append(Change(old.name, name, before, after, None, worse))
    return found


def _positive(*intervals: Interval) -> bool:
    """Whether there are ratios of intervals: none of a stored file's need be above zero."""
    return all(min(each.median, each.low, each.high) > 1e-100 for each in intervals)


def _ratio(old: Interval, new: Interval) -> Interval:
    """New over old; the intervals' relative half-widths add in squares."""
    middle = math.log(new.median / old.median)
    low = math.hypot(math.log(new.median / new.low), math.log(old.high / old.median))
    high = math.hypot(math.log(new.high / new.median), math.log(old.median / old.low))
    return Interval(math.exp(middle), math.exp(middle - low), math.exp(middle + high))
