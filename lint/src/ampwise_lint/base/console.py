"""The console that everything for a terminal is drawn on: strings are text, and do nothing.

Rich reads markup, emoji codes and highlights in strings, and passes escape sequences on; names and
source lines from outside must not get at any of it. So this console takes strings as they are, and
renders every `Text` as a line (see `neutral`). A line break is made by printing twice. What a line
has no room for goes on below, as far in as the line began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from ampwise_lint.base import neutral


class Console(rich_console.Console):  # noqa: TID251 - the one place
    """A console of rich without markup, on which no text can act."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As of rich; text is neutral, and indented throughout."""
        return super().render(self._hanging(plain(renderable), options or self.options), options)

    def _hanging(self, renderable: Any, options: ConsoleOptions) -> Any:
        """A text with its lines as far in as the first one; anything else as it is."""
        if not isinstance(renderable, Text) or options.no_wrap:
            return renderable
        indent = len(renderable.plain) - len(renderable.plain.lstrip(" "))
        room = options.max_width - indent
        if not indent or room < 1 or "\n" in renderable.plain:
            return renderable
        lines = renderable[indent:].wrap(self, room)
        joined = Text("\n", end=renderable.end).join(Text(" " * indent) + each for each in lines)
        return joined if len(lines) > 1 else renderable


def plain(renderable: Any) -> Any:
    """A string or text as text that does nothing, styles kept; anything else as it is."""
    if isinstance(renderable, str):
        return Text(neutral.line(renderable))
    if not isinstance(renderable, Text) or neutral.line(renderable.plain) == renderable.plain:
        return renderable

    def moved(offset: int) -> int:
        return len(neutral.line(renderable.plain[:offset]))

    made = renderable.blank_copy(neutral.line(renderable.plain))
    made.spans = [Span(moved(each.start), moved(each.end), each.style) for each in renderable.spans]
    return made
