"""What the reports share: pages, figures with captions, and how values are put."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from typing import Any

from ampwise.lines import place
from ampwise_lint.base import neutral
from ampwise_lint.base.page import pages


def page(template: str, **values: Any) -> str:
    """A page from a template of this package. Everything from outside is escaped."""
    ours = pages("ampwise.report", place=place, breakable=breakable)
    return ours.get_template(template).render(**values)


def number(value: float | None, style: str) -> str:
    """A value in a format; empty where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return format(value, style)


def cell(text: str) -> str:
    """Text for Markdown that cannot end a cell or line, or begin markup."""
    return re.sub(r"[\\`*_\[\]<>|&#~$]", r"\\\g<0>", " ".join(neutral.line(text).split()))


def prose(text: str) -> str:
    """Text for a paragraph, or an item of a list, in Markdown; it begins neither."""
    return re.sub(r"^(?=[-+=])|(?<=^\d)(?=[.)])", r"\\", cell(text))


def table(
    head: Sequence[str], rows: Iterable[Iterable[str]], figures: Container[int] = ()
) -> list[str]:
    """A table in Markdown; the columns of `figures` stand at the right."""
    rule = ("---:" if place in figures else "---" for place in range(len(head)))
    return [_row(map(cell, head)), _row(rule), *(_row(map(cell, each)) for each in rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def css(status: str) -> str:
    """Class of a status: its colour."""
    return {"pass": "pass", "equivalent": "pass", "fail": "fail", "different": "fail"}.get(
        status, "open"
    )


def breakable(name: str) -> Any:
    """A name of an operation or a module for a page: it may go on below after each dot or ``_``."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[^._][._])", neutral.line(name)))


def figure(svg: str, caption: str) -> Any:
    """A drawing of ours with its caption; nothing where nothing was drawn."""
    from markupsafe import Markup, escape

    if not svg:
        return Markup("")
    return Markup(
        '<figure><div class="scroll" role="img" aria-label="{0}">{1}</div>'
        "<figcaption>{0}</figcaption></figure>"
    ).format(escape(caption), Markup(svg))  # noqa: S704 - matplotlib escapes what it draws
