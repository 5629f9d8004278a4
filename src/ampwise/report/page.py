"""What the reports share: the HTML template, figures with captions, and how values are put."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from ampwise.words import counted


def page(template: str, **values: Any) -> str:
    """A page from a template of this package. Everything from outside is escaped."""
    return _environment().get_template(template).render(**values)


def number(value: float | None, style: str) -> str:
    """A value in a format; empty where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return format(value, style)


def size_unit(largest_bytes: float) -> tuple[str, float]:
    """The unit that sizes up to this one are put in, and its bytes."""
    return ("MB", 1e6) if largest_bytes >= 1e6 else ("kB", 1e3)


def size(count: float) -> str:
    """A number of bytes, as ``12.3 MB``, or in kB where that would be less than one."""
    unit, one = size_unit(count)
    return f"{count / one:,.1f} {unit}"


def cell(text: str) -> str:
    """Text for Markdown that cannot end a cell, or begin markup."""
    for each in "\\`*_[]<>|":
        text = text.replace(each, f"\\{each}")
    return " ".join(text.split())


def css(status: str) -> str:
    """Class of a status: its colour."""
    return {"pass": "pass", "equivalent": "pass", "fail": "fail", "different": "fail"}.get(
        status, "open"
    )


def figure(svg: str, caption: str) -> Any:
    """A drawing of ours with its caption; nothing where nothing was drawn."""
    from markupsafe import Markup, escape

    if not svg:
        return Markup("")
    return Markup(
        '<figure><div class="scroll" role="img" aria-label="{0}">{1}</div>'
        "<figcaption>{0}</figcaption></figure>"
    ).format(escape(caption), Markup(svg))  # noqa: S704 - matplotlib escapes what it draws


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ampwise.report")
    made: Any = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    made.globals["counted"] = counted
    return made
