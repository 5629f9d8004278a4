"""Files that read otherwise: modules loaded from their paths get another source.

Only inside this process; the files themselves, what lies beside them, and ``__file__`` are as they
were.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any


class Overlay:
    """Installed until it is removed.

    Attributes
    ----------
    not_loaded
        Paths of which no module has been loaded.
    """

    def __init__(self, files: Mapping[Path, bytes]) -> None:
        self._files = {file.resolve(): data for file, data in files.items()}
        self.not_loaded = list(self._files)
        self._of_loader = SourceFileLoader.get_code
        overlay = self

        def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
            return overlay.code(self, fullname)

        SourceFileLoader.get_code = get_code
        for file, data in files.items():
            lines = data.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[str(file)] = (len(data), None, lines, str(file))

    def remove(self) -> None:
        """Read the files themselves again; modules that are loaded stay as they are."""
        SourceFileLoader.get_code = self._of_loader
        for file in self._files:
            linecache.checkcache(str(file))

    def code(self, loader: Any, fullname: str) -> CodeType | None:
        """What a loader is to execute; never a cached ``.pyc`` of such a path."""
        file = Path(loader.path).resolve()
        if file not in self._files:
            return self._of_loader(loader, fullname)
        if file in self.not_loaded:
            self.not_loaded.remove(file)
        return compile(self._files[file], loader.path, "exec", dont_inherit=True)
