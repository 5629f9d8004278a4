"""A bench report as one HTML file: offline, without scripts, light and dark, printable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampwise.bench.memory import PARTS
from ampwise.bench.result import BenchReport
from ampwise.report import figures
from ampwise.report.bench import asked, memory_unit, remarks
from ampwise.report.page import css, figure, number, page


def to_html(report: BenchReport) -> str:
    """The page."""

    def drawn(name: str, caption: str) -> Any:
        return figure(getattr(figures, name)(report), caption)

    unit, one = memory_unit(report)
    return page(
        "bench.html",
        unit=unit,
        one=one,
        report=report,
        standing=_standing(report),
        environment=report.environment,
        parity=report.parity,
        gpu=None if report.contamination is None else report.contamination.gpu,
        parts=PARTS,
        remarks=remarks(report),
        asked=asked,
        css=css,
        figure=drawn,
        number=number,
        mean=_mean,
    )


def _standing(report: BenchReport) -> str:
    """Whether some precision meets all that is asked, all fail at something, or that is open."""
    found = [
        {requirement.status for requirement in each.requirements.values()}
        for each in report.precisions
        if each.requirements
    ]
    if any(statuses == {"pass"} for statuses in found):
        return "pass"
    return "fail" if found and all("fail" in statuses for statuses in found) else "open"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
