"""The user's own lines: where a warning points to, and where an error began."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import TracebackType

import torch

from ampwise_lint.base import neutral

_NOT_THEIRS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)


def warn_user(message: str) -> None:
    """Warn, at the innermost line on the stack that is neither ampwise's nor PyTorch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THEIRS):
        level, frame = level + 1, frame.f_back
    warnings.warn(neutral.line(message), stacklevel=level)


def users_line(trace: TracebackType | None) -> str:
    """``file:line`` of the innermost line in a traceback that is the user's; empty if none is."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_NOT_THEIRS):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
