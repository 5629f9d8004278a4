"""A `ScalingReport` on a terminal, as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from ampwise.bench.scaling_report import Scaled, ScalingReport
from ampwise.report.page import cell, number, page, prose, table
from ampwise.report.table import PlainTable, new_table
from ampwise.stats import Interval
from ampwise.telemetry.environment import named
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted, size_unit

CAPTION = (
    "median [95 % interval of paired ratios]; efficiency: rate over processes x the rate of one; "
    "apart: the same if nothing is communicated"
)
_MEMORY = ("precision", "processes", "peak", "held between steps")


def render(report: ScalingReport, console: Console) -> None:
    """Print rates and where they go, memory by rank, what to know, and what it comes to."""
    environment = named(report.environment)
    console.print()
    console.print(Text(f"{report.task} on {environment['device_name']}", style="bold"))
    console.print(Text(f"{machine(report)}; taking turns", style="dim"))
    console.print(_table(speed_head(report), speed_rows(report), CAPTION))
    unit, rows = memory_rows(report)
    if rows:
        console.print(_table(_MEMORY, rows, f"{unit} on each rank, the least to the most"))
    for line in remarks(report):
        console.print(Text(line))
    console.print()
    for index, sentence in enumerate(sentences(report)):
        console.print(Text(sentence, style="bold" if index == 0 else ""))


def to_markdown(report: ScalingReport) -> str:
    """What it comes to, and the tables."""
    unit, memory = memory_rows(report)
    lines = [f"# {cell(report.task)}: {report.processes} processes", ""]
    lines += [prose(each) + "  " for each in sentences(report)]
    speed = table(speed_head(report), speed_rows(report), range(2, 7))
    lines += ["", *speed, "", CAPTION + ".", ""]
    if memory:
        lines += [
            *table(_MEMORY, memory, range(2, 4)),
            "",
            f"{unit} on each rank, the least to the most.",
        ]
        lines.append("")
    lines += [f"- {prose(each)}" for each in remarks(report)]
    return "\n".join([*lines, "", prose(f"{machine(report)}.")]) + "\n"


def to_html(report: ScalingReport) -> str:
    """The same as a page."""
    unit, memory = memory_rows(report)
    return page(
        "scaling.html",
        report=report,
        sentences=sentences(report),
        machine=machine(report),
        speed=(speed_head(report), list(speed_rows(report))),
        memory=(_MEMORY, memory),
        unit=unit,
        caption=CAPTION,
        remarks=remarks(report),
    )


def sentences(report: ScalingReport) -> list[str]:
    """What the processes make of it, the fastest first; and where the rest goes."""
    if report.ended:
        why = f": {report.failed}" if report.failed else ""
        ended = [f"{report.ended.capitalize()}{why}; the figures are of what there was until then."]
    else:
        ended = []
    scaled = [
        each for each in report.results if each.efficiency and each.apart and each.communication
    ]
    scaled.sort(key=lambda each: -(each.samples_per_s or 0))
    return ended + [_sentence(each, report.unit) for each in scaled]


def _sentence(each: Scaled, unit: str) -> str:
    assert each.efficiency is not None
    assert each.apart is not None
    assert each.communication is not None
    count = each.processes
    return (
        f"{each.precision}, {each.parallel}: {count} processes train "
        f"{_times(each.efficiency, count)} as many {unit} a second as one; "
        f"{_times(each.apart, count)} if nothing were communicated, which takes "
        f"{share(each.communication)} of a step."
    )


def _times(efficiency: Interval, processes: int) -> str:
    low, high = efficiency.low * processes, efficiency.high * processes
    return str(Interval(efficiency.median * processes, low, high))


def machine(report: ScalingReport) -> str:
    """Processes, threads and versions."""
    environment, threads = named(report.environment), _range([str(each) for each in report.threads])
    return (
        f"{report.processes} processes, threads each: {threads}, "
        f"{counted(report.cores, 'core')}, torch {environment['torch']}, "
        f"ampwise {environment['ampwise']}"
    )


def remarks(report: ScalingReport) -> list[str]:
    """What was not measured, and what a reader should know."""
    said = list(dict.fromkeys(f"failed: {each.reason}" for each in report.results if each.reason))
    said += [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    return said + report.notes


def speed_head(report: ScalingReport) -> tuple[str, ...]:
    """Names of the columns of `speed_rows`."""
    rate = f"{report.unit}/s"
    return ("precision", "ranks", "step ms", rate, "efficiency", "apart", "communication")


def speed_rows(report: ScalingReport) -> Iterator[tuple[str, ...]]:
    """Cells of each precision on each number of processes."""
    for each in report.results:
        yield (
            each.precision,
            _ranks(each),
            "failed" if each.reason else number(each.step_ms and each.step_ms.median, ",.1f"),
            number(each.samples_per_s, ",.0f"),
            share(each.efficiency),
            "" if each.apart is None else f"{each.apart.median:.0%}",
            share(each.communication),
        )


def memory_rows(report: ScalingReport) -> tuple[str, list[tuple[str, ...]]]:
    """The unit, and cells of each precision: least and most bytes over the ranks."""
    measured = [each for each in report.results if each.peak_memory_bytes]
    unit, one = size_unit(max((max(each.peak_memory_bytes) for each in measured), default=0))

    def sizes(values: list[int]) -> str:
        return _range([f"{value / one:,.1f}" for value in sorted(values)])

    return unit, [
        (each.precision, _ranks(each), sizes(each.peak_memory_bytes), sizes(each.held_bytes))
        for each in measured
    ]


def share(interval: Interval | None) -> str:
    """A share with its interval, in percent."""
    if interval is None:
        return ""
    return f"{interval.median:.0%} [{interval.low * 100:.0f}, {interval.high * 100:.0f}]"


def _ranks(each: Scaled) -> str:
    return f"{each.processes} {each.parallel}".rstrip()


def _range(sorted_values: list[str]) -> str:
    """The first and the last, or the one that they all are."""
    return " to ".join(dict.fromkeys((*sorted_values[:1], *sorted_values[-1:])))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], caption: str) -> PlainTable:
    drawn = new_table()
    for index, name in enumerate(head):
        drawn.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    drawn.caption, drawn.caption_justify = caption, "left"
    return drawn
