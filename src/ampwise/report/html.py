"""A bench report as one HTML file: offline, without scripts, light and dark, printable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from ampwise.bench.memory import PARTS
from ampwise.bench.result import BenchReport
from ampwise.report import figures
from ampwise.report.bench import asked, remarks

_CSS = {"pass": "pass", "equivalent": "pass", "fail": "fail", "different": "fail"}


def to_html(report: BenchReport) -> str:
    """The page. Everything that comes from outside is escaped; figures are drawn here."""
    from markupsafe import Markup, escape

    def figure(name: str, caption: str) -> Markup:
        drawn = getattr(figures, name)(report)
        if not drawn:
            return Markup("")
        return Markup(
            '<figure><div role="img" aria-label="{0}">{1}</div>'
            "<figcaption>{0}</figcaption></figure>"
        ).format(escape(caption), Markup(drawn))  # noqa: S704 - matplotlib escapes what it draws

    return _template("bench.html").render(
        report=report,
        environment=report.environment,
        parity=report.parity,
        parts=PARTS,
        remarks=remarks(report),
        asked=asked,
        css=lambda status: _CSS.get(status, "open"),
        figure=figure,
        number=number,
        mean=_mean,
    )


def number(value: float | None, style: str) -> str:
    """A value in a format; empty where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return format(value, style)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ampwise.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)
