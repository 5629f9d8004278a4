r"""Text from outside, made harmless: names, paths, source lines, messages of others.

Whatever writes goes through here: the console, tables, pages, Markdown, annotations, errors. A
character that a terminal, a log or a reader would act on is shown as Python spells it, ``\x1b``:

- control characters of C0 and C1 (ESC, CSI, carriage return, ...) but the tab, and delete,
- line and paragraph separators, and what turns the direction of writing,
- lone surrogates, which no encoding can hold,
- ``::name ...::`` where a word begins, and ``##[``: in a log of GitHub's they are commands.

Line breaks are among them: what is made of several lines is written line by line. JSON escapes all
of this by itself and stays exact. This module imports nothing of ampwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ACTS = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_COMMANDS = r"(?<!\S)::(?=\s*[A-Za-z][^\n]*?::)|\#\#\["
_HARMFUL = re.compile(rf"[{_ACTS}]|{_COMMANDS}")


def line(text: str) -> str:
    """A text that stays on its line and does nothing there."""
    return _HARMFUL.sub(_spelled, text)


def values(value: Any) -> Any:
    """A value of plain JSON whose strings, names too, are lines."""
    if isinstance(value, Mapping):
        return {line(str(key)): values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [values(each) for each in value]
    return line(value) if isinstance(value, str) else value


def _spelled(found: re.Match[str]) -> str:
    matched = found[0]
    if len(matched) > 1:
        return f"{matched[0]}\\{matched[1:]}"
    return matched.encode("unicode_escape").decode()
