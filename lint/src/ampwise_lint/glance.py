"""Which files are worth parsing: by their words, and by those of the files they import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise_lint import words
from ampwise_lint.source.text import UnreadableError, read_text

if TYPE_CHECKING:
    from ampwise_lint.source.project import Project

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
class Glance:
    """What a look at a file's text tells."""

    mixed: bool
    """It has words of mixed precision."""
    loop: bool
    """It may make whole steps in it."""
    imports: tuple[Path, ...]
    """Files of the project it imports."""


class Glances:
    """Looks at the files of a project, each once."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._seen: dict[Path, Glance] = {}

    def concerns(self, path: Path, text: str, read: set[Path]) -> bool:
        """Whether a file may have anything to do with mixed precision: by itself, as a training
        loop whose scaler or autocast is another file's, or as a script that runs such a loop.

        `read` is given the files looked into.
        """
        if words.concerns(text):
            return True
        if words.has_step(text):
            return any(each.mixed for each in self._reached(path, text, read))
        return self.runs_loop(path, text, read)

    def runs_loop(self, path: Path, text: str, read: set[Path]) -> bool:
        """Whether a file imports one that trains in mixed precision, itself or as a package."""
        waiting, known = list(self._of(path, text).imports), set[Path]()
        while waiting:
            each = waiting.pop()
            if each not in known:
                known.add(each)
                read.add(each)
                found = self._of(each)
                if found.loop:
                    return True
                if each.name == "__init__.py":
                    waiting += found.imports
        return False

    def _reached(self, path: Path, text: str, read: set[Path]) -> Iterator[Glance]:
        """All files that a file imports, and those that they import."""
        waiting = list(self._of(path, text).imports)
        while waiting:
            each = waiting.pop()
            if each not in read:
                read.add(each)
                found = self._of(each)
                yield found
                waiting += found.imports

    def _of(self, path: Path, text: str | None = None) -> Glance:
        if path not in self._seen:
            try:
                text = read_text(path).text if text is None else text
            except UnreadableError:  # said when that file is checked itself
                text = ""
            found = (self._project.locate(path, *each) for each in imported(text))
            paths = dict.fromkeys(each for each in found if each is not None and each != path)
            self._seen[path] = Glance(words.is_mixed(text), words.has_loop(text), tuple(paths))
        return self._seen[path]


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
