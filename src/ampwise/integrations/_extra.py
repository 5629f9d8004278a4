"""What to say where a trainer is not installed."""

from __future__ import annotations

from ampwise.errors import MissingExtraError
from ampwise.installation import extra_command


def missing(error: ImportError, extra: str) -> MissingExtraError:
    """The error that names the extra."""
    return MissingExtraError(f"not installed ({error}): {extra_command(extra)}")
