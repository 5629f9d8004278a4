"""Which versions of torch a project asks for, in the files that say so to pip, Poetry or conda."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampwise_lint.source.text import UnreadableError, read_bytes

FILES = (
    "pyproject.toml", "setup.py", "setup.cfg", "*requirement*.txt", "requirements/*.txt",
    "environment*.yml", "environment*.yaml",
)  # fmt: skip
VERSION = r"\d+(?:\.\d+)*"
BOUND = re.compile(rf"(===?|[<>~!^]=?|=|(?<![\w.+*])(?=\d))\s*v?({VERSION})(\.?\*)?")
ONE = rf"(?:===?|[<>~!^]=?|=)\s*v?{VERSION}[\w.*+]*"
ASKED = re.compile(
    # torch = "^1.13" and torch = {version = "^1.13"}, as Poetry has it
    r"^\s*torch\s*=\s*(?:\{[^}\n]*?version\s*=\s*)?[\"'](?P<poetry>[^\"'\n]*\d[^\"'\n]*)[\"']"
    # torch>=1.13,<2 and pytorch=1.13.1=py3.9_cpu
    rf"|(?<![\w./-])(?:py)?torch(?:\[[\w,]*\])?\s*\(?(?P<bounds>{ONE}(?:\s*,\s*{ONE})*)",
    re.MULTILINE,
)
COMMENT = re.compile(r"(?:^|\s)#.*", re.MULTILINE)

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one line asks for."""

    words: str
    """As it is written: ``>=1.8,<2``."""
    file: str
    lowest: Version | None
    below: Version | None
    """The first version that is too new."""


@dataclass(frozen=True, slots=True)
class Versions:
    """All that a project asks for; nothing where no file says a version."""

    asked: tuple[Asked, ...] = ()

    def all_before(self, version: Version) -> Asked | None:
        """What keeps a project below a version; None where anything allows that version."""
        older = [e for e in self.asked if e.below is not None and e.below <= version]
        return older[0] if older and len(older) == len(self.asked) else None

    def some_before(self, version: Version) -> Asked | None:
        """What allows older versions than this one by name."""
        return next((e for e in self.asked if e.lowest is not None and e.lowest < version), None)


class Requirements:
    """What is asked for in folders, each read once."""

    def __init__(self) -> None:
        self._known: dict[Path, Versions] = {}

    def of(self, path: Path) -> Versions:
        """What the nearest folder at or above a file asks for; none above its repository."""
        return self._of(path.parent)

    def _of(self, folder: Path) -> Versions:
        if folder not in self._known:
            found = Versions(tuple(_asked_in(folder)))
            is_top = folder == folder.parent or (folder / ".git").exists()
            self._known[folder] = found if found.asked or is_top else self._of(folder.parent)
        return self._known[folder]


def _asked_in(folder: Path) -> Iterator[Asked]:
    for file in sorted({file for pattern in FILES for file in folder.glob(pattern)}):
        try:
            text = read_bytes(file).decode(errors="replace")
        except UnreadableError:
            continue
        for match in ASKED.finditer(COMMENT.sub("", text)) if "torch" in text else ():
            for words in (match["poetry"] or match["bounds"]).split("||"):
                yield asked(words.strip(), file.name, is_conda=file.suffix in (".yml", ".yaml"))


def asked(words: str, file: str = "", *, is_conda: bool = False) -> Asked:
    """The bounds that some words set: of pip, of Poetry (``^1.8``), or of conda (``=1.8``)."""
    lowest: list[Version] = []
    below: list[Version] = []
    for sign, number, star in BOUND.findall(words):
        version = tuple(map(int, number.split(".")))
        if sign in ("", "=", "==", "===", "~", "~=", "^", ">", ">="):
            lowest.append(version)
        if sign in ("<", "<="):
            below.append(version if sign == "<" else _next(version, 3))
        elif sign == "^":
            below.append(_next(version, 1))
        elif sign == "~=":
            below.append(_next(version, len(version) - 1))
        elif sign == "~":
            below.append(_next(version, 2))
        elif sign in ("", "=", "==", "==="):
            is_prefix = star or (sign == "=" and is_conda)
            below.append(_next(version, len(version) if is_prefix else 3))
    return Asked(words, file, max(lowest, default=None), min(below, default=None))


def _next(version: Version, digits: int) -> Version:
    """The first version behind all that begin with some digits of one: (1, 8, 1), 2: (1, 9)."""
    padded = (*version, 0, 0)[: max(digits, 1)]
    return (*padded[:-1], padded[-1] + 1)
