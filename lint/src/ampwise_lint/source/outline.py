"""What a file's text tells without the parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IMPORT = re.compile(
    r"""^[ \t]*(?:
        from[ \t]+ (?P<dots>\.*) (?P<source>[\w.]*) [ \t]+import[ \t]+ (?P<names>\([^)]*\)|[^\n;]+)
        | import[ \t]+ (?P<modules>[\w., \t]+)
    )""",
    re.MULTILINE | re.VERBOSE,
)
NAME = re.compile(r"(\w+)(?:\s+as\s+\w+)?")
COMMENT = re.compile(r"#.*")


@dataclass(frozen=True, slots=True)
class Outline:
    """What a look at a file's text tells."""

    mixed: bool
    """It has words of mixed precision."""
    loop: bool
    """It has, and may make whole steps."""
    imports: tuple[Path, ...]
    """Files of the project it imports."""


def imported(text: str) -> Iterator[tuple[str, int]]:
    """Names of modules that a file may import, by its text, with the number of dots before them."""
    for match in IMPORT.finditer(text):
        if match["modules"]:
            for each in match["modules"].split(","):
                yield each.strip().partition(" ")[0], 0
            continue
        source, level = match["source"], len(match["dots"])
        yield source, level
        for name in NAME.findall(COMMENT.sub("", match["names"])):
            yield f"{source}.{name}" if source else name, level
