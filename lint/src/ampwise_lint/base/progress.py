"""Progress: a live line on a terminal, a plain line every few seconds elsewhere; always stderr."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time

from ampwise_lint.base import neutral
from ampwise_lint.base.output import rewrite, tell

PLAIN_EVERY_S = 5.0


class Line:
    """One line of progress that is rewritten on a terminal and repeated, seldom, elsewhere.

    Parameters
    ----------
    quiet
        Show warnings only.
    mute
        Not even these: another process shows them.
    """

    def __init__(self, *, quiet: bool = False, mute: bool = False) -> None:
        self._quiet, self._mute = quiet or mute, mute
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._shown = False

    @property
    def room(self) -> int:
        """Characters that `show` shows."""
        return _columns() - 1 if self._terminal else sys.maxsize

    def show(self, text: str, *, now: bool = False) -> None:
        """Show the current state; `now` for what must not be left out."""
        due = now or time.monotonic() - self._last >= (0.1 if self._terminal else PLAIN_EVERY_S)
        if self._quiet or not due:
            return
        self._last = time.monotonic()
        if self._terminal:
            rewrite(text, self.room)
            self._shown = True
        else:
            tell(text, err=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A line that stays, and that being quiet does not hide."""
        self.clear()
        if not self._mute:
            tell(*self._fitted(text), err=True)

    def _fitted(self, text: str) -> list[str]:
        """A text as lines that end between words, on a terminal; elsewhere it is one line."""
        if not self._terminal:
            return [text]
        wrapper = textwrap.TextWrapper(_columns(), break_long_words=False, break_on_hyphens=False)
        return wrapper.wrap(neutral.line(text))

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self._shown:
            rewrite("", _columns() - 1)
            self._shown = False


def _columns() -> int:
    return max(20, shutil.get_terminal_size().columns)
