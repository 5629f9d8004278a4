"""Warnings that point at the line of the user's that led to them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_OWN = str(Path(__file__).parents[1])


def warn_user(message: str) -> None:
    """Warn, at the innermost line on the stack that is not ampwise's own."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
