"""A `Verification` on a terminal, as Markdown and as a page."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from ampwise.report.page import cell, css, page, prose, table
from ampwise.report.table import new_table
from ampwise.verify.result import Verification
from ampwise_lint.base.console import Console, plain
from ampwise_lint.base.words import counted

_STYLES = {"pass": "green", "fail": "red", "not measured": "yellow", "not applicable": "dim"}


def render(found: Verification, console: Console) -> None:
    """Print the table of requirements, the score and the decision."""
    console.print()
    console.print(Text(f"{found.task}, {found.precision} on {found.device}", style="bold"))
    drawn = new_table()
    drawn.add_column("requirement, and how it was checked", ratio=1)
    drawn.add_column("status", no_wrap=True)
    drawn.add_column("evidence", ratio=1)
    for each in found.findings:
        status = Text("FAIL" if each.status == "fail" else each.status, style=_STYLES[each.status])
        name = plain(f"{each.requirement}{' *' if each.critical else ''}")
        drawn.add_row(Group(name, Text(each.how, style="dim")), status, each.evidence)
    drawn.caption = "* critical: if it fails it blocks, and not measured it leaves all undecided"
    drawn.caption_justify = "left"
    console.print(drawn)
    console.print(Text(decision(found), style="bold"))


def decision(found: Verification) -> str:
    """The last line: decision and score, what failed, and what a decision lacks."""
    interrupted = found.interrupted and found.decision != "BLOCK"
    failed = [each.requirement for each in found.findings if each.status == "fail"]
    missing = [each.requirement for each in found.findings if each.open and not interrupted]
    return (
        f"{'INTERRUPTED' if interrupted else found.decision}: {found.passed} of "
        f"{counted(len(found.applicable), 'requirement')} measured and met ({found.score:.0%})"
        f"{'; failed: ' * bool(failed)}{', '.join(failed)}"
        f"{'; not measured: ' * bool(missing)}{', '.join(missing)}"
    )


def to_markdown(found: Verification) -> str:
    """The same as a traceable table."""
    title = f"{found.task}, {found.precision} on {found.device}"
    head = ("requirement", "critical", "how it was checked", "status", "evidence")
    rows = (
        (each.requirement, "yes" if each.critical else "no", each.how, each.status, each.evidence)
        for each in found.findings
    )
    return "\n".join([f"# {cell(title)}", "", prose(decision(found)), "", *table(head, rows), ""])


def to_html(found: Verification) -> str:
    """The same as a page."""
    return page("verify.html", found=found, decision=decision(found), css=css)
