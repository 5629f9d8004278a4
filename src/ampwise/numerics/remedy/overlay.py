"""A file that reads otherwise: modules loaded from its path get another source.

Only inside this process; the file itself, what lies beside it, and ``__file__`` are as they were.
"""

from __future__ import annotations

import linecache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any


class Overlay:
    """Installed until it is removed.

    Attributes
    ----------
    loads
        How many modules have been loaded from the path.
    """

    def __init__(self, file: Path, data: bytes) -> None:
        self.loads = 0
        self._file, self._data = file.resolve(), data
        self._of_loader = SourceFileLoader.get_code
        overlay = self

        def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
            return overlay.code(self, fullname)

        SourceFileLoader.get_code = get_code
        text = data.decode(errors="replace")
        linecache.cache[str(file)] = (len(data), None, text.splitlines(keepends=True), str(file))

    def remove(self) -> None:
        """Read the file itself again; modules that are loaded stay as they are."""
        SourceFileLoader.get_code = self._of_loader
        linecache.checkcache(str(self._file))

    def code(self, loader: Any, fullname: str) -> CodeType | None:
        """What a loader is to execute; never a cached ``.pyc`` of the path."""
        if Path(loader.path).resolve() != self._file:
            return self._of_loader(loader, fullname)
        self.loads += 1
        return compile(self._data, loader.path, "exec", dont_inherit=True)
