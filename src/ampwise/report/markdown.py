"""A bench report as Markdown, for pull requests and notes."""

from __future__ import annotations

from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.report.bench import asked, remarks
from ampwise.report.page import cell, number, prose, table
from ampwise.telemetry.environment import named
from ampwise_lint.base.words import counted, size

_HEAD = ("precision", "step ms", "speed, vs fp32", "peak memory", "saved", "accuracy difference")


def to_markdown(report: BenchReport) -> str:
    """Verdict, requirements, and a table of the figures."""
    environment = named(report.environment)
    lines = [f"# {cell(report.task)}", ""]
    lines += [prose(each) + "  " for each in report.verdict]
    required = (
        (asked(name, each), precision.name, each.status, each.reason)
        for precision in report.precisions
        for name, each in precision.requirements.items()
    )
    lines += ["", *table(("requirement", "precision", "status", "why"), required), ""]
    lines += table(_HEAD, (_figures(report, each) for each in report.precisions), range(1, 6))
    lines += ["", *(f"- {prose(each)}" for each in remarks(report))]
    machine = f"{environment['device_name']}, {counted(environment['threads'], 'thread')}"
    versions = f"torch {environment['torch']}, ampwise {environment['ampwise']}"
    lines += ["", prose(f"{machine}, {versions}; {counted(report.rounds, 'round')}.")]
    return "\n".join(lines) + "\n"


def _figures(report: BenchReport, each: PrecisionResult) -> tuple[str, ...]:
    parity = None if report.parity is None else report.parity.arms.get(each.name)
    return (
        each.name,
        number(each.step_ms.median, ",.2f") if each.step_ms else each.instead,
        str(each.speedup or ""),
        size(each.peak_memory_bytes) if each.peak_memory_bytes else "",
        number(each.memory_reduction, ".1%"),
        "" if parity is None else number(parity.difference, "+z.4f"),
    )
