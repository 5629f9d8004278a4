"""Mending notebooks: their cells as one program, and back, with nothing else of the file changed.

For fixing, the code cells are joined with a statement between them that says which cell begins,
and lines only IPython understands become comments with a number. A changed program is taken only
if all of these are still there, in their order and unchanged; then the lines between them are the
cells again. In the file, only the ``source`` of cells whose text changed is written anew, line by
line as it was where a line is the same: the rest stays to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ampwise_lint.source.text import cell_text, without_magics

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_CELL = re.compile(r'"ampwise: cell (\d+) begins"')
_MAGIC = re.compile(r"\s*(?:pass  )?#ampwise: line \d+ of IPython")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Notebook:
    """A notebook as text, and where the sources of its code cells lie in it."""

    raw: str
    program: str
    """The code cells, as they are mended."""
    magics: dict[str, str]
    """Comments that stand for lines of IPython, and those lines."""
    sources: dict[int, Span]
    """Places of code cells' sources, by the number of the cell from 1."""

    def cells(self, program: str) -> list[tuple[int, int]]:
        """The numbers of cells, and their first lines in a program; none before the first."""
        lines = program.split("\n")
        found = [(i, match) for i, line in enumerate(lines, 1) if (match := _CELL.fullmatch(line))]
        return [(int(match[1]), line + 1) for line, match in found]

    def with_program(self, program: str) -> str | None:
        """The file with a changed program; None where cells or magics did not come through."""
        if self._marks(program) != self._marks(self.program):
            return None
        before, after = self._texts(self.program), self._texts(program)
        raw = self.raw
        for number in sorted(after, reverse=True):  # from the end: places before stay
            if after[number] != before[number]:
                start, end = self.sources[number]
                raw = raw[:start] + _rewritten(raw[start:end], after[number], raw) + raw[end:]
        return raw

    def _marks(self, program: str) -> list[str]:
        return [e for e in program.split("\n") if _CELL.fullmatch(e) or _MAGIC.fullmatch(e)]

    def _texts(self, program: str) -> dict[int, str]:
        """The cells' texts, by number."""
        lines = [self.magics.get(each, each) for each in program.split("\n")]
        cells = [*self.cells(program), (0, len(lines) + 1)]
        return {
            number: "\n".join(lines[first - 1 : following - 2])
            for (number, first), (_, following) in pairwise(cells)
        }


def notebook(raw: str) -> Notebook:
    """A notebook whose text was read and parsed before; it may begin with a byte-order mark."""
    lines: list[str] = []
    magics: dict[str, str] = {}
    sources: dict[int, Span] = {}
    for number, span in _sources(raw):
        sources[number] = span
        body = cell_text({"source": json.loads(raw[slice(*span)])})
        lines.append(f'"ampwise: cell {number} begins"')
        for line, plain in zip(body.split("\n"), without_magics(body), strict=True):
            if plain == line:
                lines.append(line)
                continue
            mark = f"{plain.partition('#')[0]}#ampwise: line {len(magics)} of IPython"
            magics[mark] = line
            lines.append(mark)
    return Notebook(raw, "\n".join([*lines, ""]), magics, sources)


# ---------------------------------------------------------------------- places in JSON


def _sources(raw: str) -> Iterator[tuple[int, Span]]:
    """Code cells by number, and the places of their sources."""
    book = _members(raw, raw.index("{"))
    cells = book.get("cells")
    if cells is None:  # nbformat 3
        first = next(_elements(raw, book["worksheets"][0]))
        cells = _members(raw, first[0])["cells"]
    for number, (start, _) in enumerate(_elements(raw, cells[0]), 1):
        if raw[start] != "{":
            continue
        cell = _members(raw, start)
        source = cell.get("source", cell.get("input"))
        kind = cell.get("cell_type")
        if source is not None and kind is not None and json.loads(raw[slice(*kind)]) == "code":
            yield number, source


def _skip(raw: str, index: int) -> int:
    """Where the next token begins."""
    found = _SPACE.match(raw, index)
    return found.end() if found is not None else index


def _members(raw: str, start: int) -> dict[str, Span]:
    """Places of an object's values."""
    found: dict[str, Span] = {}
    index = _skip(raw, start + 1)
    while raw[index] != "}":
        key, index = _DECODER.raw_decode(raw, index)
        value = _skip(raw, _skip(raw, index) + 1)
        _, index = _DECODER.raw_decode(raw, value)
        found[key] = (value, index)
        index = _skip(raw, index)
        index = _skip(raw, index + 1) if raw[index] == "," else index
    return found


def _elements(raw: str, start: int) -> Iterator[Span]:
    """Places of an array's elements."""
    index = _skip(raw, start + 1)
    while raw[index] != "]":
        _, end = _DECODER.raw_decode(raw, index)
        yield index, end
        index = _skip(raw, end)
        index = _skip(raw, index + 1) if raw[index] == "," else index


def _rewritten(old: str, text: str, raw: str) -> str:
    """A source of a cell with another text, laid out as the old one."""
    ascii_only = raw.isascii()
    if old.startswith('"'):
        return json.dumps(text, ensure_ascii=ascii_only)
    places = list(_elements(old, 0))
    known: dict[Any, str] = {json.loads(old[slice(*each)]): old[slice(*each)] for each in places}
    lines: list[str] = re.findall(r"[^\n]*\n|[^\n]+", text)
    written = [known.get(each) or json.dumps(each, ensure_ascii=ascii_only) for each in lines]
    if not places:
        return f"[{', '.join(written)}]"
    between = old[places[0][1] : places[1][0]] if len(places) > 1 else f",{old[1 : places[0][0]]}"
    return old[: places[0][0]] + between.join(written) + old[places[-1][1] :]
