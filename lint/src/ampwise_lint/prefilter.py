"""Which files are worth parsing: by the triggers of the rules, in them and in what they import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ampwise_lint.source.outline import Outline, imported
from ampwise_lint.source.project import Project
from ampwise_lint.source.text import UnreadableError, read_text
from ampwise_lint.triggers import STEP, Trigger, has_whole_step


class Prefilter:
    """Looks at the files of a project by their text, each once."""

    def __init__(self, project: Project, triggers: Sequence[Trigger]) -> None:
        self._project = project
        self._anywhere = [each for each in triggers if each.anywhere]
        self._in_step = [each for each in triggers if not each.anywhere]

    def concerns(self, path: Path, text: str, read: set[Path]) -> bool:
        """Whether a rule may find something in a file: by itself, as a training loop whose scaler
        or autocast is another file's, or as a script that runs such a loop.

        `read` is given the files looked into.
        """
        if any(each.is_in(text) for each in self._anywhere):
            return True
        if STEP.is_in(text):
            reached = self.reached(path, text, read)
            return self._is_mixed(text) or any(self._of(each).mixed for each in reached)
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

    def _is_mixed(self, text: str) -> bool:
        return any(each.is_in(text) for each in self._in_step)

    def reached(
        self, path: Path, text: str, read: set[Path], *, packages: bool = False
    ) -> Iterator[Path]:
        """All files that a file imports, and those that they import; `read` is given them.

        Parameters
        ----------
        packages
            The packages around those, too, which run with them: ``models/__init__.py`` of
            ``from models.registry import build`` fills the registry.
        """
        waiting, known = list(self._of(path, text).imports), {path}
        while waiting:
            each = waiting.pop()
            if each not in known:
                known.add(each)
                read.add(each)
                yield each
                waiting += self._of(each).imports
                package = each.parent / "__init__.py"
                if packages and package in self._project.files:
                    waiting += [] if package.parent in path.parents else [package]

    def _of(self, path: Path, text: str | None = None) -> Outline:
        seen = self._project.outlines
        if path not in seen:
            try:
                text = read_text(path).text if text is None else text
            except UnreadableError:  # said when that file is checked itself
                text = ""
            found = (self._project.locate(path, *each) for each in imported(text))
            paths = dict.fromkeys(each for each in found if each is not None and each != path)
            mixed = self._is_mixed(text)
            seen[path] = Outline(mixed, mixed and has_whole_step(text), tuple(paths))
        return seen[path]
