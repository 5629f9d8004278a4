"""Where a trainer was made that sees to precision by itself.

On a CPU Accelerate, and the Hugging Face Trainer by way of it, take float16 and do nothing about
it: there is nothing in torch to see. So the line is noted that makes their state. A script imports
Accelerate after we have begun; a finder in front of the others waits for that, and leaves it to
them to find it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampwise.lines import NOWHERE, Line, users_line
from ampwise.observe.patches import Patches
from ampwise.observe.session import Session

_STATE = "accelerate.state"


class Trainers:
    """The first of them.

    Attributes
    ----------
    line
        The user's line that made it.
    """

    what = "where Accelerate was asked for a precision"

    def __init__(self, session: Session) -> None:
        self.line: Line = NOWHERE
        self._session = session

    def install(self, patches: Patches) -> None:
        """Put it in place, now or when Accelerate is imported."""

        def imported(module: ModuleType) -> None:
            with patches.attempt(self.what):
                patches.wrap(module.AcceleratorState, "__init__", self._made)

        if _STATE in sys.modules:
            imported(sys.modules[_STATE])
        else:
            patches.hook(_Once(_STATE, imported))

    def _made(self, real: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        if self._session.active and not self.line.file:
            self.line = users_line()
        real(state, *args, **kwargs)


class _Once:
    """Says when a module has been imported; a finder that finds nothing by itself."""

    def __init__(self, name: str, imported: Callable[[ModuleType], object]) -> None:
        self._name, self._imported = name, imported
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the others find, told when it has run."""
        del path, target
        if name != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def and_tell(module: ModuleType) -> None:
                run(module)
                self._imported(module)

            loader.exec_module = and_tell
        return spec

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
