"""Writing a result where ``--json`` and such options say."""

from __future__ import annotations

import os
from pathlib import Path

from ampwise_lint.base.errors import UsageError
from ampwise_lint.base.output import tell, tell_json


def check_target(name: str, target: str | Path | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Raises
    ------
    UsageError
        When its folder is not there, or it cannot be written.
    """
    if target is None or str(target) == "-":
        return
    file = Path(target)
    if file.is_dir():
        why = "it is a folder"
    elif not file.parent.is_dir():
        why = f"there is no folder {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "no permission to write there"
    else:
        return
    raise UsageError(f"{name}: cannot write to {target}: {why}; name a writable file")


def write_json(text: str, target: str | None) -> None:
    """Write a result where ``--json`` says; None: nowhere."""
    if target is None:
        return
    if target == "-":
        tell_json(text)
        return
    write_report(text + "\n", Path(target))


def write_report(text: str, file: Path) -> None:
    """Write a result to a file, and say whether there was one before."""
    did = "replaced" if file.exists() else "wrote"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {file}: {error.strerror}; name a writable file"
        ) from None
    tell(f"{did} {file}", err=True)
