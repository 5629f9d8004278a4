"""``--fix``: makes the edits of findings, checks the file again, and goes on until none is left.

A file is written only when what comes out parses and has fewer findings of the rules that were
applied; aside first, then renamed. Mode, owner, line ends, encoding and byte-order mark stay, and a
link stays a link; of a notebook everything but the sources of the cells that were mended
(`notebook`).
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from ampwise_lint.base.files import atomic_write
from ampwise_lint.engine import Checked, check_module, shown
from ampwise_lint.findings import Finding, LintReport, Safety, Skipped
from ampwise_lint.notebook import Notebook, notebook
from ampwise_lint.settings import Settings
from ampwise_lint.source.project import Project
from ampwise_lint.source.text import Source, UnreadableError, parse, read

ROUNDS = 12
"""A fix may uncover the next mistake. More rounds than there are findings, and rules that do so,
mean that one fix undoes another."""


@dataclass(slots=True)
class Mended:
    """What became of files that were to be mended."""

    files: dict[Path, int] = field(default_factory=dict[Path, int])
    """How many findings went."""
    refused: list[Skipped] = field(default_factory=list[Skipped])
    """Files that could not be written, and why."""


def fix_files(report: LintReport, files: list[Path], settings: Settings, *, unsafe: bool) -> Mended:
    """Mend what was found in some files, in place."""
    ways: dict[Path, list[Path]] = {}
    for each in report.findings:
        if each.edits:
            # Of a mistake that only another file leads to, that one is walked again as well.
            way = ways.setdefault(Path(each.path).absolute(), [])
            way += [Path(each.reached_from).absolute()] if each.reached_from else []
    mended = Mended()
    for path in filter(ways.__contains__, files):
        try:
            if count := fix_file(path, frozenset(files), settings, unsafe, ways[path]):
                mended.files[path] = count
        except OSError as error:
            mended.refused.append(Skipped(shown(path), error.strerror or str(error)))
    return mended


def fix_file(
    path: Path,
    known: frozenset[Path],
    settings: Settings,
    unsafe: bool,
    ways: Sequence[Path] = (),
) -> int:
    """Mend one file, as it is and as other files lead there; how many findings went.

    Raises
    ------
    OSError
        When it cannot be written.
    """
    try:
        source = read(path)
        book = notebook(path.read_bytes().decode("utf-8")) if path.suffix == ".ipynb" else None
    except (UnreadableError, OSError):
        return 0
    allowed: tuple[Safety, ...] = ("safe", "unsafe") if unsafe else ("safe",)
    mender = _Mender(source, book, known, tuple(dict.fromkeys(ways)), settings, allowed)
    text = begin = source.text if book is None else book.program
    gone = 0
    findings = mender.fixable(text)
    for _ in range(ROUNDS + len(findings)):
        better = mender.improved(text, findings)
        if better is None:
            break
        text, findings, count = better
        gone += count
    written = text if book is None else book.with_program(text)
    if text != begin and written is not None:
        _rewrite(path, written.encode(source.encoding))
    return gone


def _rewrite(path: Path, data: bytes) -> None:
    """Replace what a file holds, or the file that a link leads to; mode and owner stay."""
    target = path.resolve()
    before = target.stat()

    def write(aside: BinaryIO) -> None:
        aside.write(data)
        # Only root may give a file to somebody else, and on Windows nobody.
        with contextlib.suppress(OSError, AttributeError):
            os.chown(aside.name, before.st_uid, before.st_gid)
        shutil.copymode(target, aside.name)

    atomic_write(target, write)


@dataclass(frozen=True, slots=True)
class _Mender:
    """Finds what can be mended in a file, were this or that its text."""

    source: Source
    book: Notebook | None
    known: frozenset[Path]
    ways: tuple[Path, ...]
    settings: Settings
    allowed: tuple[Safety, ...]

    def fixable(self, text: str) -> list[Finding]:
        """Findings with edits that may be made."""
        cells = self.book.cells(text) if self.book is not None else []
        source = replace(self.source, text=text, tree=parse(text), cells=cells)
        project = Project(self.known)
        mended = project.add(source)
        found: dict[tuple[object, ...], Finding] = {}
        for module in (mended, *map(project.module, self.ways)):
            checked = Checked(module.path)
            check_module(module, checked)
            for each in checked.findings:
                allowed = each.fix in self.allowed and self.settings.wants(each)
                if each.edits and allowed and each.path == str(mended.path):
                    found.setdefault(each.place, each)
        return list(found.values())

    def improved(self, text: str, findings: list[Finding]) -> tuple[str, list[Finding], int] | None:
        """The text with edits that help (all at once, or else the first one that does), what can be
        mended then, and how many findings of the rules applied went.
        """
        groups = [_apart(findings), *([each] for each in findings)] if findings else []
        before = Counter(each.code for each in findings)
        for group in groups:
            changed, made = _applied(text, group)
            if not made or changed == text or not self._comes_through(changed):
                continue
            left = self.fixable(changed)
            after = Counter(each.code for each in left)
            went = [before[code] - after[code] for code in {each.code for each in made}]
            if min(went) > 0:
                return changed, left, sum(went)
        return None

    def _comes_through(self, text: str) -> bool:
        """Whether a changed program of a notebook can be taken apart into its cells again."""
        return self.book is None or self.book.with_program(text) is not None


def _apart(findings: list[Finding]) -> list[Finding]:
    """Findings whose edits do not touch the same lines. What is put between lines touches none."""
    taken: set[int] = set()
    chosen: list[Finding] = []
    for finding in findings:
        inside = [each for each in finding.edits if each.what not in ("before", "after")]
        lines = {line for e in inside for line in range(e.line, e.end_line + 1)}
        if not lines & taken:
            taken |= lines
            chosen.append(finding)
    return chosen


def _applied(text: str, findings: list[Finding]) -> tuple[str, list[Finding]]:
    """The text with edits made, and of which findings: all edits of one are made, or none."""
    from ampwise_lint import edits  # loads libcst, which checking does without

    while findings:
        try:
            changed, unfit = edits.apply(text, [edit for each in findings for edit in each.edits])
            ast.parse(changed)
        except edits.PROBLEMS:
            return text, []
        fit = [each for each in findings if not unfit.intersection(each.edits)]
        if len(fit) == len(findings):
            return changed, findings
        findings = fit
    return text, []
