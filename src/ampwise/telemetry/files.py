"""Files that are whole or not there at all, and files that somebody else may have written."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MAX_INT = 2**63
"""No count in a file is as large as this."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular(path: Path) -> Path:
    """The path itself, if reading it comes to an end.

    Raises
    ------
    OSError
        When it is not there, or is a folder, pipe, socket or device.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        is_a = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"expected a file, it is {is_a}", str(path))
    return path


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
