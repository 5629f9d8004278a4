"""What a check of some files found. Becomes text, JSON, SARIF and annotations in `report.lint`."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "ampwise.lint/1"

Severity = Literal["error", "warning", "info"]
Safety = Literal["safe", "unsafe", ""]
Change = Literal[
    "replace", "before", "after", "remove", "argument", "out", "decorate", "wrap", "decorator"
]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source, by the place of the node it changes.

    ``replace``: the expression at the span becomes `text`; ``before`` / ``after``: the statement
    `text` is put before or after the statement at the span; ``remove``: the statement goes;
    ``argument``: the call (or dict) gets the argument (or item) `text`; ``out``: the statement
    and those behind it leave the ``with`` block they end; ``decorate``: `text` is put right
    behind the expression; ``wrap``: the statements of one block from the span's start to its end
    are put below the header `text` (``with ...:``, ``if ...:``); ``decorator``: `text` becomes a
    decorator below the one at the span.
    """

    what: Change
    line: int
    column: int
    end_line: int
    end_column: int
    text: str = ""
    node: ast.AST | None = field(default=None, compare=False, repr=False)
    """The node it is about, until it is known that it stands in the file the edit is for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake, on the line of the call that must change. Lines from 1, columns from 1."""

    path: str
    line: int
    column: int
    code: str
    name: str
    severity: Severity
    message: str
    fix: Safety = ""
    edits: tuple[Edit, ...] = ()
    end_line: int = 0
    cell: int | None = None
    """Cell of a notebook, from 1; `line` is then the line in the cell."""
    source: str = ""
    """The line, as it stands in the file."""
    reached_from: str = ""
    """The file whose paths lead there, where it is another one."""

    @property
    def place(self) -> tuple[str, int, int, int, str]:
        """Where it is, and which rule's: what two findings of one mistake share."""
        return self.path, self.cell or 0, self.line, self.column, self.code

    @property
    def words(self) -> str:
        """The message, and which file leads there where it is another one."""
        way = f" (reached from {self.reached_from})" if self.reached_from else ""
        return self.message + way

    def to_json(self) -> dict[str, Any]:
        """As in the ``ampwise.lint/1`` schema."""
        found: dict[str, Any] = {
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "code": self.code,
            "name": self.name,
            "severity": self.severity,
            "message": self.message,
            "fixable": bool(self.edits),
            "fix": self.fix if self.edits else None,
        }
        if self.cell is not None:
            found["cell"] = self.cell
        if self.reached_from:
            found["reached_from"] = self.reached_from
        return found


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was not read, or not to its end."""

    path: str
    reason: str


@dataclass(slots=True)
class LintReport:
    """All findings, sorted by place."""

    findings: list[Finding] = field(default_factory=list[Finding])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    files: int = 0
    fixed: int = 0
    """Edits written by ``--fix``."""
    baselined: int = 0
    """Findings the baseline file holds."""
    cached: int = 0
    """Files whose findings came from the cache."""

    @property
    def statistics(self) -> Counter[str]:
        """Findings per code."""
        return Counter(each.code for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The ``ampwise.lint/1`` object."""
        return {
            "schema": SCHEMA,
            "findings": [each.to_json() for each in self.findings],
            "files": self.files,
            "fixed": self.fixed,
            "baselined": self.baselined,
            "skipped": [{"path": each.path, "reason": each.reason} for each in self.skipped],
            "statistics": dict(sorted(self.statistics.items())),
        }
