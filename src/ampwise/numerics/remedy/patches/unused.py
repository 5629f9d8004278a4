"""Numbers with a name that a patch leaves without a use: a reviewer would ask to drop them, too."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from ampwise.numerics.remedy.lines import lines_of


def without_unused(before: str, after: str, path: Path) -> str:
    """A changed file without numbers on its top level that it read, and reads no more.

    One that another file of the folder names stays; so does one below a comment that may be about
    others.
    """
    lines = lines_of(after)
    for name, at in reversed([*_numbers(after)]):
        if _times(name, after) > 1 or _times(name, before) == 1 or _is_named_beside(name, path):
            continue
        above = sum(1 for _ in takewhile(lambda each: each.startswith("#"), lines[:at][::-1]))
        first = at - above
        blank = min(_blank(lines[:first][::-1]), _blank(lines[at + 1 :]))
        if not above or blank:
            del lines[first : at + 1 + blank]
    return "".join(lines)


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    """Names of numbers on the top level, each on a line of its own, and which this is, from 0."""
    body = ast.parse(text).body
    first = Counter(each.lineno for each in body)
    for each in body:
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if _is_number(value) and each.lineno == each.end_lineno and first[each.lineno] == 1:
                yield name, each.lineno - 1
            case _:
                pass


def _is_number(value: ast.expr | None) -> bool:
    inner = value.operand if isinstance(value, ast.UnaryOp) else value
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int | float)


def _times(name: str, text: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", text))


def _is_named_beside(name: str, path: Path) -> bool:
    others = (each for each in path.parent.glob("*.py") if each != path)
    return any(_times(name, each.read_text(errors="replace")) for each in others)


def _blank(lines: Sequence[str]) -> int:
    """How many blank lines come first."""
    return sum(1 for _ in takewhile(lambda each: not each.strip(), lines))
