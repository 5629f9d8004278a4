"""What a command says, and standard output and error that it can lose without losing its work.

All that commands write, but for what is drawn on a `Console`, goes through `tell`: lines on which
nothing from outside can act. What a stream's encoding lacks is spelled out.

A reader may go away (``| head -1``), and a disk may be full (``> file``). Either ends the output,
and neither ends the command: it writes its files and keeps its exit code. What a full disk cost of
the standard output is an error all the same, said at the end; a reader that has gone wants no more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Any, TextIO

from ampwise_lint.base import neutral


def tell(*lines: str, err: bool = False) -> None:
    """Print lines on standard output, or on standard error."""
    for each in lines:
        print(neutral.line(each), file=sys.stderr if err else sys.stdout, flush=err)


def tell_text(text: str, *, err: bool = False) -> None:
    """Print a text of several lines; a line break at its end is not doubled."""
    tell(*text.removesuffix("\n").split("\n"), err=err)


def tell_json(text: str) -> None:
    """Print JSON, which has control characters escaped; it stays what it means, to the letter."""
    print(text.replace("##[", "\\u0023\\u0023["))  # noqa: T201


def say(message: str) -> None:
    """Tell the user something beside the result."""
    tell(f"ampwise: {message}", err=True)


def rewrite(text: str, width: int) -> None:
    """Replace the current line of a terminal at standard error; no text leaves it empty."""
    shown = f"\r{neutral.line(text)[:width]:{width}}" + ("" if text else "\r")
    print(shown, end="", file=sys.stderr, flush=True)  # noqa: T201


class Output:
    """Passes text on to a stream until that fails, and keeps the error; then writes nowhere.

    Attributes
    ----------
    error
        What ended the output; None if nothing did.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Pass text on, or drop it."""
        if self.error is None:
            try:
                self._stream.write(self._encodable(text))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Hand everything to the system, unless it is lost."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def complaint(self) -> str:
        """What to say of output that was lost against the user's will; empty if none was."""
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return ""
        return f"standard output: {self.error.strerror}"

    def _encodable(self, text: str) -> str:
        """Text in letters that the stream has; others as escapes, as of code in other alphabets."""
        encoding = self._stream.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _lose(self, error: OSError) -> None:
        self.error = error
        # What is still in the stream's buffer would make Python complain at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def lasting_output() -> Generator[Output]:
    """Inside, ``sys.stdout`` and ``sys.stderr`` are of `Output`; gives the former."""
    output, progress = Output(sys.stdout), Output(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(progress):
        yield output
