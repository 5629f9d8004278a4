"""Whose code a file is, and the innermost line on the stack that is the user's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_OURS = str(Path(__file__).parent) + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_PATHS = sysconfig.get_paths()
_NOT_THEIRS = (
    _OURS, "<", *(f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib", "scripts")),
)  # fmt: skip


class Line(NamedTuple):
    """A line of code; `file` is empty where there is none."""

    file: str
    line: int


NOWHERE = Line("", 0)


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither ours, nor the standard library's, nor an installed package's."""
    return not (file.startswith(_NOT_THEIRS) or any(each in file for each in _INSTALLED))


def users_line(frame: FrameType | None = None) -> Line:
    """The innermost line that is the user's, from a frame (default: the caller's) outwards."""
    each: FrameType | None = sys._getframe(1) if frame is None else frame
    while each is not None:
        if is_users(each.f_code.co_filename):
            return Line(each.f_code.co_filename, each.f_lineno)
        each = each.f_back
    return NOWHERE


def place(file: str, line: int) -> str:
    """``file:line``, from the working directory where it is below that; empty if not known."""
    if not file:
        return ""
    below = file.startswith(f"{Path.cwd()}/")
    return f"{os.path.relpath(file) if below else file}:{line}"
