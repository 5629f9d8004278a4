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

_FILE = re.compile(r"^--- a/(.+?)\t?\n\+\+\+ .*\n", re.MULTILINE)
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


def files_of(fix: Fix) -> list[Path]:
    """The files that a patch is of, from the working directory."""
    return list(_by_file(fix))


def _by_file(fix: Fix) -> dict[Path, str]:
    """The parts of a patch by their file."""
    parts = _FILE.split(fix.patch or "")[1:]
    return {Path(name): text for name, text in zip(parts[::2], parts[1::2], strict=True)}


def check(fix: Fix, *, force: bool) -> None:
    """Refuse a patch whose change could not be told from the user's own, or not be taken back.

    Raises
    ------
    UsageError
        When one of its files is not below the working directory; or, not under `force`, has changes
        that are not committed, or is in no git tree.
    """
    for file in files_of(fix):
        _check(file, force=force)


def _check(file: Path, *, force: bool) -> None:
    inside = file.resolve().is_relative_to(Path.cwd().resolve())
    if not inside or not file.is_file():
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
    """Apply a patch in the working directory; nothing of it where a part does not fit.

    Raises
    ------
    UsageError
        When a file is not what was diagnosed any more.
    """
    made = {file.resolve(): _text(file, part) for file, part in _by_file(fix).items()}
    for file, data in made.items():

        def write(aside: BinaryIO, file: Path = file, data: bytes = data) -> None:
            aside.write(data)
            shutil.copymode(file, aside.name)

        atomic_write(file, write)


def _text(file: Path, part: str) -> bytes:
    """A file with its part of a patch."""
    with tokenize.open(file) as opened:
        encoding = opened.encoding
    lines = lines_of(file.read_bytes().decode(encoding))
    try:
        return "".join(_patched(lines, lines_of(part))).encode(encoding)
    except ValueError:
        raise UsageError(
            f"--fix: {file} has changed since it was diagnosed: run diagnose again"
        ) from None


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
        elif sign in (" ", "-"):
            if at >= len(lines) or lines[at] != text:
                raise ValueError(number)
            at += 1
            if sign == " ":
                yield text
        elif sign == "+":
            yield text
    yield from lines[at:]


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str] | None:
    git = shutil.which("git")
    if git is None:
        return None
    return subprocess.run(  # noqa: S603 - git, on the file's own folder
        [git, "-C", str(folder), *words], capture_output=True, text=True, check=False
    )
