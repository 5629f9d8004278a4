"""``--fix``: makes the edits of findings, checks the file again, and goes on until none is left.

A file is written only when what comes out parses and has fewer findings of the rules that were
applied; aside first, then renamed. Line ends, encoding and byte-order mark stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import libcst as cst

from ampwise.errors import UsageError
from ampwise.lint.edits import apply
from ampwise.lint.engine import Checked, check_source
from ampwise.lint.findings import Finding
from ampwise.lint.project import Project
from ampwise.lint.settings import Settings
from ampwise.lint.source import UnreadableError, parse, read
from ampwise.telemetry.files import atomic_write

ROUNDS = 12
"""A fix may uncover the next mistake. More rounds than there are rules that do so mean that one
fix undoes another."""


def fix_files(paths: list[Path], settings: Settings, *, unsafe: bool) -> dict[Path, int]:
    """Mend files in place; how many findings went, by file.

    Raises
    ------
    UsageError
        When a file cannot be written.
    """
    mended: dict[Path, int] = {}
    for path in paths:
        if path.suffix != ".ipynb" and (
            count := fix_file(path, frozenset(paths), settings, unsafe)
        ):
            mended[path] = count
    return mended


def fix_file(path: Path, known: frozenset[Path], settings: Settings, unsafe: bool) -> int:
    """Mend one file; how many findings went."""
    try:
        source = read(path)
    except UnreadableError:
        return 0
    text, gone = source.text, 0
    for _ in range(ROUNDS):
        findings = _fixable(path, text, known, settings, unsafe)
        better = _improved(path, text, findings, known, settings, unsafe)
        if better is None:
            break
        text, count = better
        gone += count
    if text != source.text:
        data = text.encode(source.encoding)
        try:
            atomic_write(path, lambda file: file.write(data))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return gone


def _fixable(
    path: Path, text: str, known: frozenset[Path], settings: Settings, unsafe: bool
) -> list[Finding]:
    found = _check(path, text, known)
    allowed = ("safe", "unsafe") if unsafe else ("safe",)
    return [e for e in found if e.edits and e.fix in allowed and settings.wants(e)]


def _check(path: Path, text: str, known: frozenset[Path]) -> list[Finding]:
    """The findings of a file, were this its text."""
    project = Project(known)
    source = replace(read(path), text=text, tree=parse(text))
    checked = Checked(path)
    check_source(source, project, checked)
    return checked.findings


def _improved(
    path: Path,
    text: str,
    findings: list[Finding],
    known: frozenset[Path],
    settings: Settings,
    unsafe: bool,
) -> tuple[str, int] | None:
    """The text with edits that help, all at once or else the first one that does."""
    groups = [_apart(findings), *([each] for each in findings)] if findings else []
    for group in groups:
        changed = _applied(text, group)
        if changed is None or changed == text:
            continue
        left = Counter(e.code for e in _fixable(path, changed, known, settings, unsafe))
        before = Counter(e.code for e in findings)
        touched = {each.code for each in group}
        if all(left[code] < before[code] for code in touched):
            return changed, sum(before[code] - left[code] for code in touched)
    return None


def _apart(findings: list[Finding]) -> list[Finding]:
    """Findings whose edits do not touch the same lines."""
    taken: set[int] = set()
    chosen: list[Finding] = []
    for finding in findings:
        lines = {line for e in finding.edits for line in range(e.line, e.end_line + 1)}
        if not lines & taken:
            taken |= lines
            chosen.append(finding)
    return chosen


def _applied(text: str, findings: list[Finding]) -> str | None:
    try:
        changed = apply(text, [edit for each in findings for edit in each.edits])
        ast.parse(changed)
    except (cst.ParserSyntaxError, cst.CSTValidationError, SyntaxError, ValueError, RecursionError):
        return None
    return changed
