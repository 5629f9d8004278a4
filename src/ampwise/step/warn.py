"""Warnings that point at the line of the user's that led to them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

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
    warnings.warn(message, stacklevel=level)
