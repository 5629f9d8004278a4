"""What `ampwise run` saw: on a terminal, as Markdown and as a page."""

from __future__ import annotations

from rich.text import Text

from ampwise.observe.result import RunReport
from ampwise.report.console import Console
from ampwise.words import counted


def headline(report: RunReport) -> str:
    """What there is to say first."""
    return f"{report.script} {report.ending} after {counted(report.steps, 'step')}"


def render(report: RunReport, console: Console) -> None:
    """Print it."""
    console.print(Text(headline(report)))


def to_markdown(report: RunReport) -> str:
    """The same as text."""
    return f"# {headline(report)}\n"


def to_html(report: RunReport) -> str:
    """The page."""
    return headline(report)
