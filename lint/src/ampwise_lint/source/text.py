"""Reading files: encodings, notebooks, and what cannot be read, with the reason."""

from __future__ import annotations

import ast
import io
import json
import re
import stat
import symtable
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ampwise_lint.base.errors import in_one_line

SUFFIXES = (".py", ".pyw", ".ipynb")
"""Of what is checked in folders. A file that is named may also have none, as scripts do."""

MAX_BYTES = 4 << 20
"""Larger files are data or generated; the largest of torch's own has 1.3 MB."""

PYTHON_2 = re.compile(
    r"^\s*(print\s+[\"'\w]|exec\s+[\"'\w]|except\s+[\w.()]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)",
    re.MULTILINE,
)
SHEBANG = re.compile(rb"#!.*python")
IGNORE = re.compile(r"#\s*ampwise:\s*ignore(?P<file>-file)?(?:\[(?P<codes>[\w\s,]*)\])?")
MAGIC = re.compile(r"^\s*(%|!|\?)|^[\w.]+\?{1,2}\s*$")
PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")


class UnreadableError(Exception):
    """A file that cannot be checked; the message is the reason."""


@dataclass
class Text:
    """The text of a file. Of a notebook: its code cells, one after another."""

    path: Path
    text: str
    encoding: str = "utf-8"
    cells: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Of a notebook: (number of the cell from 1, its first line in `text`)."""

    @cached_property
    def lines(self) -> list[str]:
        """The text by lines, as Python counts them: a form feed ends none."""
        return re.split(r"\r\n|\r|\n", self.text)

    def cell_of(self, line: int) -> tuple[int, int] | None:
        """The cell a line of `text` lies in, and its line there; None outside notebooks."""
        if not self.cells:
            return None
        number, first = self.cells[bisect_right([each[1] for each in self.cells], line) - 1]
        return number, line - first + 1

    def is_one_cell(self, lines: Iterable[int]) -> bool:
        """Whether some lines lie in one cell; outside notebooks all do."""
        return len({cell[0] for line in lines if (cell := self.cell_of(line)) is not None}) <= 1

    def ignores(self, line: int, code: str) -> bool:
        """Whether a comment silences a rule on a line."""
        lines, whole = self._ignored
        codes = lines.get(line, frozenset())
        return whole or codes is None or any(code.startswith(each) for each in codes)

    @cached_property
    def _ignored(self) -> tuple[dict[int, frozenset[str] | None], bool]:
        """Codes silenced on each line (None: all of them), and whether the file is left out."""
        lines: dict[int, frozenset[str] | None] = {}
        if "ampwise:" not in self.text:
            return lines, False
        # A comment ends a physical line; a string that looks like one is none.
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type != tokenize.COMMENT or not (found := IGNORE.search(token.string)):
                continue
            if found["file"]:
                return lines, True
            codes = found["codes"]
            named = frozenset(each.strip().upper() for each in codes.split(",")) if codes else None
            lines[token.start[0]] = named
        return lines, False


@dataclass
class Source(Text):
    """The text of a file, and its syntax tree."""

    tree: ast.Module = field(kw_only=True)


def read(path: Path) -> Source:
    """Read and parse a file.

    Raises
    ------
    UnreadableError
        With the reason, in words.
    """
    text = read_text(path)
    return Source(text.path, text.text, text.encoding, text.cells, tree=parse(text.text))


def read_text(path: Path) -> Text:
    """Read a file.

    Raises
    ------
    UnreadableError
        With the reason, in words.
    """
    raw = read_bytes(path)
    if path.suffix == ".ipynb":
        return _notebook(path, raw)
    if path.suffix not in (*SUFFIXES, "") and not SHEBANG.match(raw):
        raise UnreadableError(
            f"not Python: expected a name ending in {', '.join(SUFFIXES)}, or a first line such as "
            "#!/usr/bin/env python3"
        )
    return Text(path, *decode(raw))


def read_bytes(path: Path) -> bytes:
    """What a file holds. Only regular files are opened: reading a pipe might never end.

    Raises
    ------
    UnreadableError
        With the reason, in words.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"not a file: {_kind(found.st_mode)}")
        if found.st_size > MAX_BYTES:
            raise UnreadableError(f"larger than {MAX_BYTES >> 20} MiB")
        return path.read_bytes()
    except FileNotFoundError:
        gone = "a link to nothing" if path.is_symlink() else "gone since it was found"
        raise UnreadableError(gone) from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder that cannot be listed"
    if stat.S_ISFIFO(mode):
        return "a pipe (FIFO)"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def decode(raw: bytes) -> tuple[str, str]:
    """Text of a source file, by its encoding declaration or byte-order mark (PEP 263)."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"not decodable: {in_one_line(error)}") from None
    if "\0" in text:
        raise UnreadableError("holds null bytes: not Python source")
    return text, encoding


def parse(text: str) -> ast.Module:
    """The syntax tree of a module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return ast.parse(text)
    except SyntaxError as error:
        if PYTHON_2.search(text):
            raise UnreadableError("Python 2 code") from None
        raise UnreadableError(f"syntax error in line {error.lineno}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise UnreadableError("nested too deeply to parse") from None
    except ValueError as error:
        raise UnreadableError(f"not parsable: {in_one_line(error)}") from None


def check_syntax(text: str) -> None:
    """Whether a module parses, in two thirds of the time it takes to make the tree.

    Raises
    ------
    UnreadableError
        With the reason, in words.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symtable.symtable(text, "", "exec")
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        parse(text)  # says why, or that only what comes behind parsing objects


def _notebook(path: Path, raw: bytes) -> Text:
    try:
        book: Any = json.loads(raw.decode("utf-8-sig"))
        cells = book["cells"] if "cells" in book else book["worksheets"][0]["cells"]
        language = book.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    except RecursionError:
        raise UnreadableError("not a notebook: nested too deeply") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UnreadableError(f"not a notebook: {in_one_line(error)}") from None
    if not isinstance(cells, list):
        raise UnreadableError(f"not a notebook: cells is of type {type(cells).__name__}")
    if str(language).lower() not in ("python", ""):
        raise UnreadableError(f"a notebook in {language}")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        body = cell_text(cell)
        places.append((number, len(lines) + 1))
        lines += without_magics(body)
    return Text(path, "\n".join(lines) + "\n", "utf-8", places or [(1, 1)])


def cell_text(cell: dict[str, Any]) -> str:
    """What a code cell holds: a string or a list of lines, as nbformat has it.

    Raises
    ------
    UnreadableError
        When it is something else.
    """
    body = cell.get("source", cell.get("input", ""))
    lines = body if isinstance(body, list) else [body]
    if not all(isinstance(each, str) for each in lines):
        raise UnreadableError("not a notebook: the source of a code cell is no text")
    return "".join(lines)


def without_magics(body: str) -> list[str]:
    """A cell's lines, with what only IPython understands made comments; as many lines as before."""
    lines = body.split("\n")
    start = next((each.strip() for each in lines if each.strip()), "")
    if start.startswith("%%") and not start.startswith(PYTHON_CELLS):
        return ["#" + each for each in lines]
    kept: list[str] = []
    continued = False
    for line in lines:
        if continued or MAGIC.match(line):
            continued = line.rstrip().endswith("\\")
            indent = line[: len(line) - len(line.lstrip())]
            # A magic may be all there is in a block.
            kept.append(f"{indent}pass  #{line.strip()}" if indent else f"#{line}")
        else:
            kept.append(line)
    return kept
