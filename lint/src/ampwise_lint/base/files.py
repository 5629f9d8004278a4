"""Files that are whole or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace `path` so that a kill or a full disk leaves the old file or the new one.

    Written aside in the same folder, synced, renamed, and the folder synced.

    Raises
    ------
    OSError
        When it cannot be written; what was written aside is removed.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write` of a text, as UTF-8; lone surrogates, which it lacks, are spelled out."""
    atomic_write(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can sync folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
