"""Shows what a check of some files found: text, annotations, SARIF, statistics, a page."""

from __future__ import annotations

import os
import re
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import console as rich_console
from rich.markdown import Markdown
from rich.text import Text

from ampwise_lint import __version__
from ampwise_lint.base import neutral
from ampwise_lint.base.console import Console
from ampwise_lint.base.page import pages
from ampwise_lint.base.words import counted
from ampwise_lint.findings import Finding, LintReport
from ampwise_lint.rule import Rule
from ampwise_lint.rules import all_rules

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
SARIF_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
GITHUB_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
EXCERPT = 160
"""Characters of a source line that are shown: some lines are data."""


def render(report: LintReport, console: Console | None = None, *, summary: bool = True) -> None:
    """Print findings with their source lines, what was skipped, and a count."""
    console = console or Console(soft_wrap=True)
    for each in report.findings:
        _finding(each, console)
    _skipped(report, console)
    if summary:
        console.print(Text(headline(report)))


def _skipped(report: LintReport, console: Console) -> None:
    for each in report.skipped:
        console.print(Text.assemble((each.path, "bold"), f": not read: {each.reason}"))


def place(finding: Finding) -> str:
    """``path:line:column``, with the cell of a notebook."""
    cell = f":cell {finding.cell}" if finding.cell is not None else ""
    return f"{finding.path}{cell}:{finding.line}:{finding.column}"


def _finding(finding: Finding, console: Console) -> None:
    style = STYLES[finding.severity]
    mendable = f" [{finding.fix} fix]" if finding.edits else ""
    console.print(
        Text.assemble(
            (place(finding), "bold"), ": ", (finding.code, style), f" {finding.name}{mendable}"
        )
    )
    number = str(finding.line)
    text = _excerpt(finding).expandtabs(4)
    bar = " " * len(number)
    console.print(Text.assemble((f"  {number} | ", "dim"), text))
    column = len(finding.source[: finding.column - 1].expandtabs(4))
    if column < EXCERPT:
        console.print(Text.assemble((f"  {bar} | ", "dim"), " " * column, ("^", style)))
    width = max(40, min(console.width, 100)) - 4
    for line in textwrap.wrap(finding.words, width):
        console.print(Text(f"    {line}"))
    console.print()


def _excerpt(finding: Finding) -> str:
    text = finding.source.rstrip()
    return text[:EXCERPT] + "..." if len(text) > EXCERPT else text


def headline(report: LintReport) -> str:
    """What was found, in how many files, and how many were not read or not to their end."""
    files = counted(report.files, "file")
    unread = len(report.skipped)
    if unread == report.files and not report.findings:
        return f"{files}: {'none' if unread != 1 else 'not'} read"
    counts = {kind: sum(each.severity == kind for each in report.findings) for kind in STYLES}
    words = {"error": "error", "warning": "warning", "info": "hint"}
    parts = [
        f"{count} {words[kind]}{'s' if count != 1 else ''}"
        for kind, count in counts.items()
        if count
    ]
    of_all = f"{report.files - unread:,} of " if unread else ""
    said = [f"{of_all}{files}: {', '.join(parts) if parts else 'no findings'}"]
    if report.fixed:
        said.append(f"{report.fixed} mended")
    safe = sum(bool(each.edits) and each.fix == "safe" for each in report.findings)
    unsafe = sum(bool(each.edits) and each.fix == "unsafe" for each in report.findings)
    if safe:
        said.append(f"--fix mends {safe}")
    if unsafe:
        said.append(f"--unsafe-fixes {unsafe} more")
    if report.baselined:
        said.append(f"{report.baselined} known")
    if unread:
        said.append(f"{unread:,} not read")
    return "; ".join(said)


def statistics(report: LintReport, console: Console | None = None) -> None:
    """Print how often each rule fired."""
    console = console or Console(soft_wrap=True)
    rules = all_rules()
    for code, count in report.statistics.most_common():
        rule = rules[code]
        console.print(
            Text.assemble(f"{count:>6}  ", (code, STYLES[rule.severity]), f"  {rule.name}")
        )
    _skipped(report, console)
    console.print(Text(headline(report)))


def github(report: LintReport) -> None:
    """Print findings as the workflow commands GitHub shows beside the lines of a pull request."""
    for each in report.findings:
        level = GITHUB_LEVELS[each.severity]
        print(  # noqa: T201 - the format is this output
            f"::{level} file={_property(each.path)},line={each.line},col={each.column},"
            f"title={_property(f'{each.code} {each.name}')}::{_data(each.words)}"
        )
    for each in report.skipped:
        print(  # noqa: T201
            f"::warning file={_property(each.path)},title=not read::{_data(each.reason)}"
        )


def _data(text: str) -> str:
    return neutral.line(_coded(text))


def _property(text: str) -> str:
    return neutral.line(_coded(text).replace(":", "%3A").replace(",", "%2C"))


def _coded(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def explain(rule: Rule, console: Any = None) -> None:
    """Print a rule's documentation: formatted on a terminal, as it is elsewhere."""
    console = console or rich_console.Console()  # noqa: TID251 - our own words only
    title = f"{rule.code} {rule.name} ({rule.severity})"
    body = rule.doc.partition("\n")[2].strip()
    if console.is_terminal:
        console.print(Markdown(f"# {title}\n\n{body}"))
    else:
        console.file.write(f"# {title}\n\n{body}\n")


def to_html(report: LintReport) -> str:
    """The findings as a page, file by file, each with its line of the source."""
    rules = all_rules()
    template = pages("ampwise_lint").get_template("lint.html")
    return template.render(
        report=report,
        headline=headline(report),
        version=__version__,
        counts=[(rules[code], count) for code, count in report.statistics.most_common()],
        files=[(path, list(each)) for path, each in groupby(report.findings, lambda e: e.path)],
        css={"error": "fail", "warning": "open", "info": "soft"},
        excerpt=_excerpt,
        fix=_fix,
    )


def _fix(finding: Finding) -> str:
    if not finding.edits:
        return "by hand"
    return {
        "safe": "--fix makes it",
        "unsafe": "--unsafe-fixes makes it; behaviour may change",
        "": "by hand",
    }[finding.fix]


def to_sarif(report: LintReport) -> dict[str, Any]:
    """A SARIF 2.1.0 log (OASIS standard) of a report."""
    used = sorted({each.code for each in report.findings})
    rules = all_rules()
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ampwise",
                        "version": __version__,
                        "rules": [_sarif_rule(rules[code]) for code in used],
                    }
                },
                "results": [_sarif_result(each, used.index(each.code)) for each in report.findings],
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            {
                                "level": "note",
                                "message": {"text": _sarif_text(f"not read: {each.reason}")},
                                "locations": [_sarif_place(each.path)],
                            }
                            for each in report.skipped
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
            }
        ],
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.name.replace("-", " ")},
        "help": {"text": rule.doc, "markdown": rule.doc},
        "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": SARIF_LEVELS[finding.severity],
        "message": {"text": _sarif_text(finding.words)},
        "locations": [_sarif_place(finding.path, region)],
    }


def _sarif_place(path: str, region: dict[str, int] | None = None) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(path)}}
    if region is not None:
        place["region"] = region
    return {"physicalLocation": place}


def _sarif_text(text: str) -> str:
    """Text of a message; a bracket before a link's target would make a link of it."""
    return re.sub(r"\](?=\()", r"\]", neutral.line(text))


def _uri(path: str) -> str:
    file = Path(path)
    if file.is_absolute():
        return file.as_uri()
    from urllib.parse import quote

    return quote(os.fsencode(file.as_posix()))
