"""Tables for a terminal: whatever comes from outside stays text, and narrow terminals get lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from ampwise_lint.base.console import plain

NARROW = 70
"""Columns below which a table becomes a list of names and values."""


class PlainTable(Table):
    """A table in which ``[red]`` is no markup, and whose rows are lists where it does not fit."""

    def add_column(self, header: Any = "", *arguments: Any, **options: Any) -> None:
        """As of `Table`; the header is text."""
        super().add_column(plain(header), *arguments, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        """As of `Table`; strings are text."""
        super().add_row(*map(plain, cells), **options)

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        self.caption = None if self.caption is None else plain(self.caption)
        if self._fits(options.max_width):
            yield from super().__rich_console__(console, options)
        else:
            yield from self._listed()

    def _fits(self, width: int) -> bool:
        """Whether there is room for the columns that must not wrap."""
        fixed = sum(
            1 + max(plain(cell).cell_len for cell in (column.header, *column.cells))
            for column in self.columns
            if column.no_wrap
        )
        return width >= NARROW and fixed < width

    def _listed(self) -> Iterator[Text]:
        """Each row as lines of name and value, the first cell as their heading."""
        names = [plain(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for place, (name, value) in enumerate(zip(names, map(_in_one, row), strict=True)):
                start = ("" if place == 0 else "  ") + (f"{name.plain}: " if name.plain else "")
                if value.plain:
                    yield Text.assemble((start, "dim"), value)
        if self.caption is not None:
            yield plain(self.caption)
        yield Text()


def _in_one(cell: Any) -> Text:
    """A cell as one text, also where it has several lines."""
    return Text(": ").join(map(plain, cell.renderables)) if isinstance(cell, Group) else plain(cell)


def new_table() -> PlainTable:
    """A table with a rule below its head and nothing else."""
    return PlainTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
