"""What `ampwise run` saw: on a terminal, as Markdown and as a page."""

from __future__ import annotations

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampwise.lines import place
from ampwise.observe.result import Finding
from ampwise.report import curves, diagnosis
from ampwise.report.canvas import colour_of
from ampwise.report.observed import NOT_ACTIVE, ObservedRun, title
from ampwise.report.page import cell, figure, number, page, prose, table
from ampwise_lint.base.console import Console, plain
from ampwise_lint.base.words import counted

_MOST = 4
"""Of lines, faults and findings on a terminal; the other forms have all."""
_STYLES = {"pass": "bold green", "fail": "bold red", "open": "bold"}
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


def render(run: ObservedRun, console: Console) -> None:
    """Print what precision ran, then what went wrong, what happened, and what to do."""
    console.print()
    active = run.report.precision.active
    console.print(Text(run.headline, style=_STYLES["open" if active else "fail"]))
    _listed([f"  {each}" for each in run.exceptions], console)
    if run.report.steps:
        console.print(Text(run.outcome))
    for found in run.report.faults[:_MOST]:
        diagnosis.render_short(found, console)
    _more(len(run.report.faults), "fault", console)
    findings = [each for each in run.report.findings if each.code != NOT_ACTIVE]
    _findings(findings, console)
    if run.report.faults or findings:
        console.print()
    console.print(_grid(run))
    for sentence in run.advice:
        console.print(Text(sentence, style=_STYLES["pass" if run.is_clean else "open"]))


def _listed(lines: list[str], console: Console) -> None:
    for line in lines[:_MOST]:
        console.print(Text(line))
    _more(len(lines), "line", console)


def _more(count: int, what: str, console: Console) -> None:
    if count > _MOST:
        console.print(Text(f"  and {counted(count - _MOST, f'more {what}')}", style="dim"))


def _findings(findings: list[Finding], console: Console) -> None:
    for each in findings[:_MOST]:
        console.print()
        console.print(Text(title(each), style=_SEVERITIES[each.severity]))
        console.print(Padding(Text(each.message), (0, 0, 0, 2)))
        if each.evidence:
            console.print(Padding(Text(f"seen: {each.evidence}", style="dim"), (0, 0, 0, 2)))
    _more(len(findings), "finding", console)


def _grid(run: ObservedRun) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in run.rows:
        grid.add_row(plain(name), plain(value))
    return grid


def to_markdown(run: ObservedRun) -> str:
    """Headline, faults, findings, figures and advice."""
    report = run.report
    lines = [f"# {cell(run.headline)}", "", *(f"- {prose(each)}" for each in run.exceptions), ""]
    lines += [prose(run.outcome), ""]
    for found in report.faults:
        lines += [f"## {cell(diagnosis.headline(found))}", "", *diagnosis.body(found)]
    if report.findings:
        rows = (
            (place(each.file, each.line), each.code, each.severity, each.message, each.evidence,
             f"{each.times:,}") for each in report.findings
        )  # fmt: skip
        lines += table(("line", "code", "severity", "what", "seen", "times"), rows, figures={5})
        lines += [""]
    if run.rows:
        lines += [*table(("", ""), run.rows), ""]
    lines += [prose(each) for each in run.advice]
    return "\n".join(lines).rstrip() + "\n"


def to_html(run: ObservedRun) -> str:
    """The page: what ran, faults, findings, curves of the steps, figures, dtypes, environment."""
    colour = colour_of(run.preset)
    skipped = [each.step for each in run.report.skips]
    drawn = {
        "loss": curves.loss(run.steps, colour),
        "scale": curves.scale(run.steps, colour, skipped),
        "norm": curves.norm(run.steps, colour),
        "times": curves.times(run.steps, colour),
    }
    return page(
        "run.html",
        run=run,
        report=run.report,
        headline_of=diagnosis.headline,
        number=number,
        severity={"error": "fail", "warning": "open", "info": "left"},
        figure=lambda name, caption: figure(drawn[name], caption),
    )
