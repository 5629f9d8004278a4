"""A bench report as Markdown, for pull requests and notes."""

from __future__ import annotations

from ampwise.bench.result import BenchReport
from ampwise.report.bench import asked, remarks
from ampwise.report.page import cell, number, size
from ampwise.words import counted


def to_markdown(report: BenchReport) -> str:
    """Verdict, requirements, and a table of the figures."""
    environment = report.environment
    lines = [f"# {cell(report.task)}", ""]
    lines += [cell(each) + "  " for each in report.verdict]
    lines += ["", "| requirement | precision | status | why |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {asked(name, each)} | {cell(precision.name)} | {each.status} | {cell(each.reason)} |"
        for precision in report.precisions
        for name, each in precision.requirements.items()
    ]
    lines += [
        "",
        "| precision | step ms | speed, vs fp32 | peak memory | saved | accuracy difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in report.precisions:
        parity = None if report.parity is None else report.parity.arms.get(each.name)
        cells = [
            cell(each.name),
            number(each.step_ms.median, ",.2f") if each.step_ms else each.status,
            str(each.speedup or ""),
            size(each.peak_memory_bytes) if each.peak_memory_bytes else "",
            number(each.memory_reduction, ".1%"),
            "" if parity is None else number(parity.difference, "+z.4f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {cell(each)}" for each in remarks(report))]
    machine = f"{cell(environment['device_name'])}, {counted(environment['threads'], 'thread')}"
    versions = f"torch {environment['torch']}, ampwise {environment['ampwise']}"
    lines += ["", f"{machine}, {versions}; {counted(report.rounds, 'round')}."]
    return "\n".join(lines) + "\n"
