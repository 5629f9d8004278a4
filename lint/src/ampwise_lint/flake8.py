"""ampwise's rules as a flake8 plugin: ``flake8 --select AMP``.

flake8 hands over one file at a time, so imports between files are not followed here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampwise_lint import __version__
from ampwise_lint.engine import Checked, check_module
from ampwise_lint.source.project import Project
from ampwise_lint.source.text import Source


class Plugin:
    """What flake8 makes for each file."""

    name = "ampwise"
    version = __version__

    def __init__(self, tree: ast.Module, filename: str, lines: list[str]) -> None:
        self._source = Source(Path(filename).absolute(), "".join(lines), tree=tree)

    def run(self) -> Iterator[tuple[int, int, str, type[Any]]]:
        """Line, column from 0, text that begins with the code, and this class."""
        checked = Checked(self._source.path)
        project = Project(frozenset({self._source.path}))
        check_module(project.add(self._source), checked)
        for each in checked.findings:
            yield each.line, each.column - 1, f"{each.code} {each.message}", type(self)
