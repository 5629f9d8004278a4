"""Functions of torch with something around them, for as long as a script runs.

What cannot be put in place (another version of torch) is said, and the run goes on without it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from ampwise.errors import in_one_line
from ampwise.observe.result import NotObserved


class Removable(Protocol):
    """A handle of torch's."""

    def remove(self) -> None:
        """Take the hook out."""


class Patches:
    """What is put in, and what could not be.

    Attributes
    ----------
    missing
        What is not observed, and why.
    """

    def __init__(self) -> None:
        self.missing: list[NotObserved] = []
        self._undo: list[Callable[[], object]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around(real, *args, **kwargs)`` where ``owner.name`` is called."""
        real, around = getattr(owner, name), unseen(around)
        inherited = isinstance(owner, type) and name not in vars(owner)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(real, *args, **kwargs)

        wrapper = functools.wraps(real)(unseen(wrapped))
        self.replace(owner, name, wrapper, inherited=inherited)

    def replace(self, owner: Any, name: str, value: Any, *, inherited: bool = False) -> None:
        """Set ``owner.name`` until the end; `inherited`: it was not the owner's own before."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        undo = (lambda: delattr(owner, name)) if inherited else lambda: setattr(owner, name, before)
        self._undo.append(undo)

    def hook(self, handle: Removable) -> None:
        """Remove a hook at the end."""
        self._undo.append(handle.remove)

    @contextmanager
    def attempt(self, what: str) -> Generator[None]:
        """Inside, something is put in place; if it cannot be, that is noted."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - said in the report; the script is not at fault
            self.missing.append(NotObserved(what, f"{type(error).__name__}: {in_one_line(error)}"))

    def undo(self) -> None:
        """Take everything out again, the last first."""
        while self._undo:
            self._undo.pop()()


_UNSEEN = "<importlib._bootstrap: ampwise>"
"""Frames that `warnings.warn` leaves out when it counts levels up to the user's line."""


def unseen(function: Any) -> Any:
    """The same function, or method; warnings that pass through it name the line they would."""
    if isinstance(function, types.MethodType):
        return types.MethodType(unseen(function.__func__), function.__self__)
    made = types.FunctionType(
        function.__code__.replace(co_filename=_UNSEEN),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
