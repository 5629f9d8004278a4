"""Errors that are raised on purpose, exit codes, and how an error is put in one line.

`ampwise.errors` draws the whole tree; the linter needs its trunk.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

from ampwise_lint.base import neutral

EXIT_OK = 0
EXIT_GATE = 1
EXIT_USAGE = 2
EXIT_RUN = 3
EXIT_INTERRUPTED = 130

_WRONG_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOENT}
"""Failures of the file system that another path mends; a full disk is none of them."""


class AmpwiseError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns.

    Each argument is a line of the message, whatever names from outside are in it.
    """

    exit_code = EXIT_USAGE

    def __str__(self) -> str:
        return "\n".join(neutral.line(str(each)) for each in self.args)


class UsageError(AmpwiseError):
    """The request cannot be carried out as written."""


class MissingExtraError(UsageError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


def nearest(word: str, legal: Iterable[str]) -> str:
    """``"; did you mean 'bf16'?"`` when a legal word is close to `word`, else ``""``."""
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_one_line(error: BaseException) -> str:
    """What an error says, in a line of at most 300 characters; its kind if it says nothing."""
    return neutral.line(" ".join(str(error).split())[:300]) or type(error).__name__


def kind_and_words(error: BaseException) -> str:
    """The kind of an error, and what it says, in one line."""
    kind, words = type(error).__name__, in_one_line(error)
    return kind if words == kind else f"{kind}: {words}"


def explained(error: Exception, *, debug: bool) -> tuple[str, int]:
    """What a command says of an error that ends it, and its exit code."""
    if isinstance(error, AmpwiseError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        code = EXIT_USAGE if error.errno in _WRONG_PLACE else EXIT_RUN
        return neutral.line(f"{error.filename or 'file'}: {error.strerror or error}"), code
    hint = "" if debug else "; --debug shows where"
    words = f"{type(error).__name__}: {in_one_line(error)}"
    return f"{words} (this is a bug in ampwise{hint})", EXIT_RUN
