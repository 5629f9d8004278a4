"""Draws a `BenchReport` on a terminal, in 80 columns."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ampwise.bench.levers import Levers, Refit
from ampwise.bench.memory import PARTS
from ampwise.bench.result import BenchReport, PrecisionResult, Requirement
from ampwise.report.table import new_table
from ampwise.stats import Interval
from ampwise.telemetry.environment import named
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted, size, size_unit

_STYLES = {"pass": "green", "fail": "red", "not measured": "yellow"}
_SIGNS = {"pass": "pass", "fail": "FAIL", "not measured": "not measured"}


def render(report: BenchReport, console: Console) -> None:
    """Print speed and loss, memory, requirements, what was not measured, and the verdict."""
    environment = named(report.environment)
    console.print()
    console.print(Text(f"{report.task} on {environment['device_name']}", style="bold"))
    console.print(
        Text(
            f"{environment['architecture']}, {counted(environment['threads'], 'thread')}, torch "
            f"{environment['torch']}; {counted(report.rounds, 'round')}, precisions taking turns",
            style="dim",
        )
    )
    console.print(Group(_speed(report), *([_memory(report)] if _has_memory(report) else [])))
    if any(each.requirements for each in report.precisions):
        console.print(_requirements(report))
    if report.levers is not None and report.levers.results:
        console.print(_levers(report.levers))
    if report.levers is not None and report.levers.refit is not None:
        console.print(_refit(report.levers.refit, report.unit))
    for line in remarks(report):
        console.print(Text(line), soft_wrap=False)
    console.print()
    for index, sentence in enumerate(report.verdict):
        console.print(Text(sentence, style="bold" if index == 0 else ""))


def _speed(report: BenchReport) -> Table:
    table = new_table()
    table.add_column("precision", no_wrap=True)
    table.add_column("step ms", justify="right", no_wrap=True)
    table.add_column("speed, vs fp32", justify="right", no_wrap=True)
    table.add_column(f"{report.unit}/s", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    has_loss = any(each.loss_after is not None for each in report.precisions)
    if has_loss:  # a task need not say it
        table.add_column("loss", justify="right", no_wrap=True)
    for each in report.precisions:
        cells = (
            each.name,
            _milliseconds(each.step_ms),
            _speedup(each),
            f"{each.samples_per_s:,.0f}" if each.samples_per_s else "",
            _peak(each),
            _loss(each),
        )
        table.add_row(*cells[: len(table.columns)])
    before = next((p.loss_before for p in report.precisions if p.loss_before is not None), None)
    loss = "" if before is None else f"; held-out loss after the rounds, {before:.3f} before"
    noise = "" if report.noise is None else f"; fp32 against itself: {report.noise}"
    table.caption = f"median [95 % interval of paired ratios]{noise}{loss}"
    table.caption_justify = "left"
    return table


def memory_unit(report: BenchReport) -> tuple[str, float]:
    """The unit that peaks are put in, and its bytes."""
    return size_unit(max((each.peak_memory_bytes or 0 for each in report.precisions), default=0))


def _memory(report: BenchReport) -> Table:
    table = new_table()
    unit, one = memory_unit(report)
    table.add_column(f"{unit} at the peak", no_wrap=True)
    measured = [each for each in report.precisions if each.memory]
    for each in measured:
        table.add_column(each.name, justify="right", no_wrap=True)
    for part in PARTS:
        table.add_row(part, *(f"{each.memory.get(part, 0) / one:,.1f}" for each in measured))
    return table


def _has_memory(report: BenchReport) -> bool:
    return any(each.memory for each in report.precisions)


def _requirements(report: BenchReport) -> Table:
    table = new_table()
    table.add_column("requirement", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("why")
    for each in report.precisions:
        for name, requirement in each.requirements.items():
            table.add_row(
                f"{asked(name, requirement)}",
                each.name,
                Text(_SIGNS[requirement.status], style=_STYLES[requirement.status]),
                _why(each, requirement),
            )
    return table


def _levers(levers: Levers) -> Table:
    table = new_table()
    table.add_column("beside precision")
    table.add_column("in", no_wrap=True)
    table.add_column("speed, vs without", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    for each in levers.results:
        saved = "" if each.memory_reduction is None else f"{-each.memory_reduction:+.0%}"
        table.add_row(each.name, each.precision, str(each.speedup or each.reason), saved)
    return table


def _refit(found: Refit, unit: str) -> Table:
    table = new_table()
    table.add_column("the batch that fits into fp32's memory")
    table.add_column("in", no_wrap=True)
    table.add_column(f"{unit}/s, vs its own batch", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_row(
        f"{found.times}x as large",
        found.precision,
        str(found.samples_per_s_ratio or ""),
        size(found.peak_memory_bytes),
    )
    return table


def _why(precision: PrecisionResult, requirement: Requirement) -> str:
    """The reason, once: what stands below the table is not repeated in it."""
    return "see below" if requirement.reason == precision.reason else requirement.reason


def asked(name: str, requirement: Requirement) -> str:
    """A requirement as it was asked."""
    if name == "speedup":
        return f"speedup >= {requirement.threshold:g}"
    if name == "memory_reduction":
        return f"memory saved >= {requirement.threshold:.0%}"
    return f"accuracy diff < {requirement.threshold:g}"


def remarks(report: BenchReport) -> list[str]:
    """What was not measured, and why, and what a reader should know."""
    remarks = [f"{each.status}: {each.reason}" for each in report.precisions if each.reason]
    remarks += [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    return remarks + report.notes


def _milliseconds(step: Interval | None) -> str:
    return "" if step is None else f"{step.median:,.1f}"


def _speedup(precision: PrecisionResult) -> str:
    if precision.speedup is not None:
        return str(precision.speedup)
    if precision.emulated:
        return "emulated"
    return "1x" if precision.step_ms is not None else precision.instead


def _peak(precision: PrecisionResult) -> str:
    if precision.peak_memory_bytes is None:
        return ""
    peak, saved = size(precision.peak_memory_bytes), precision.memory_reduction
    return peak if saved is None else f"{peak} ({-saved:+.0%})"


def _loss(precision: PrecisionResult) -> str:
    return "" if precision.loss_after is None else f"{precision.loss_after:.3f}"
