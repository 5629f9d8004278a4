"""A patch written to a file, or applied to the user's source, so that it can be taken back."""

from __future__ import annotations

import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ampwise.errors import UsageError
from ampwise.numerics.remedy.lines import lines_of
from ampwise.numerics.result import Diagnosis, Fix
from ampwise_lint.base.files import atomic_write

_HUNK = re.compile(r"@@ -(\d+)")


def best(found: Diagnosis) -> Fix | None:
    """The patch to take: a verified one, or else one that could not be run."""
    patches = [each for each in found.fixes if each.patch]
    runnable = [each for each in patches if each.verified]
    open_ones = [each for each in patches if each.patch_status.startswith("suggestion: not run")]
    return next(iter([*runnable, *open_ones]), None)


def text_of(fix: Fix) -> str:
    """A patch with a line about what is known of it, which ``git apply`` passes over."""
    return f"{fix.what}: {fix.patch_status}\n\n{fix.patch}"


def file_of(fix: Fix) -> Path:
    """The file that a patch is of, from the working directory."""
    found = re.search(r"^--- a/(.+?)\t?$", fix.patch or "", re.MULTILINE)
    assert found is not None  # it is one of ours
    return Path(found[1])


def check(fix: Fix, *, force: bool) -> None:
    """Refuse a file whose change could not be told from the user's own, or not be taken back.

    Raises
    ------
    UsageError
        When it has changes that are not committed, or is in no git tree; not under `force`.
    """
    file = file_of(fix)
    if not file.is_file():
        raise UsageError(f"--fix: {file} is not below the working directory: run it from there")
    if force:
        return
    status = _git(file.parent, "status", "--porcelain", "--", file.name)
    ignored = _git(file.parent, "check-ignore", "--quiet", file.name)
    if status is None or status.returncode or (ignored is not None and not ignored.returncode):
        raise UsageError(
            f"--fix: {file} is in no git tree, so the change could not be taken back: commit it "
            "first, or pass --force"
        )
    if status.stdout.strip():
        raise UsageError(
            f"--fix: {file} has changes that are not committed: commit them first, or pass --force"
        )


def apply(fix: Fix) -> None:
    """Apply a patch in the working directory.

    Raises
    ------
    UsageError
        When the file is not what was diagnosed any more.
    """
    file = file_of(fix).resolve()
    with tokenize.open(file) as opened:
        encoding = opened.encoding
    lines = lines_of(file.read_bytes().decode(encoding))
    try:
        text = "".join(_patched(lines, lines_of(fix.patch or "")))
    except ValueError:
        raise UsageError(
            f"--fix: {file_of(fix)} has changed since it was diagnosed: run diagnose again"
        ) from None

    def write(aside: BinaryIO) -> None:
        aside.write(text.encode(encoding))
        shutil.copymode(file, aside.name)

    atomic_write(file, write)


def _patched(lines: Sequence[str], patch: Sequence[str]) -> Iterator[str]:
    """Lines of a file with the hunks of a unified diff made; ValueError where one does not fit."""
    at = 0
    for number, each in enumerate(patch):
        sign, text = each[:1], each[1:]
        if number + 1 < len(patch) and patch[number + 1].startswith("\\"):
            text = text.removesuffix("\n")  # no end of line there
        if header := _HUNK.match(each):
            begin = max(0, int(header[1]) - 1)
            yield from lines[at:begin]
            at = begin
        elif sign in (" ", "-") and not each.startswith("--- "):
            if at >= len(lines) or lines[at] != text:
                raise ValueError(number)
            at += 1
            if sign == " ":
                yield text
        elif sign == "+" and not each.startswith("+++ "):
            yield text
    yield from lines[at:]


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str] | None:
    git = shutil.which("git")
    if git is None:
        return None
    return subprocess.run(  # noqa: S603 - git, on the file's own folder
        [git, "-C", str(folder), *words], capture_output=True, text=True, check=False
    )
