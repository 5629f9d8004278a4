"""Checkpoints that a race withholds: its parameters were trained in several precisions.

Files that are named are not written, by torch, safetensors or `torch.distributed.checkpoint`. What
goes into a buffer or an open file is: whoever made one reads it back, or has emptied the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from concurrent.futures import Future
from typing import Any

from ampwise.observe.patches import Patches
from ampwise.observe.session import Session


class Checkpoints:
    """Withholds them.

    Attributes
    ----------
    withheld
        How many were not written.
    """

    what = "checkpoints that a race is to withhold"

    def __init__(self, session: Session) -> None:
        self.withheld = 0
        self._session = session

    def install(self, patches: Patches) -> None:
        """Put it in place, before a script imports the functions by name."""
        for place, name, around in (
            ("torch", "save", self._save),
            ("safetensors.torch", "save_file", self._write),
            ("torch.distributed.checkpoint", "save", self._write),
            ("torch.distributed.checkpoint", "async_save", self._write_later),
        ):
            if importlib.util.find_spec(place.partition(".")[0]) is not None:
                patches.wrap(importlib.import_module(place), name, around)

    def _save(self, real: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if self._session.active and isinstance(f, str | os.PathLike):
            self.withheld += 1
        else:
            real(obj, f, *args, **kwargs)

    def _write(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._session.active:
            return real(*args, **kwargs)
        self.withheld += 1
        return None

    def _write_later(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._session.active:
            return real(*args, **kwargs)
        self.withheld += 1
        done: Future[None] = Future()
        done.set_result(None)
        return done
