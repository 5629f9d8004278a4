"""Operations that run, those of compiled code among them: recorded below Python.

Under a dispatch mode of Python's, compiled code would run eagerly, and round otherwise. PyTorch's
profiler is told of every operation by the dispatcher itself, with the dtypes of its inputs and what
it runs inside of, whoever calls it; nothing that runs is another for it. Of lines and modules it
knows nothing. What a compiler writes itself is no operation: products in templates
(``max-autotune``), and all that a CUDA graph repeats. There is one profiler: a script that wants it
gets it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

from ampwise.formats import dtype_name
from ampwise.observe.patches import Patches

_BACKWARD = "autograd::engine::evaluate_function"
_STDERR = 2


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation that ran.

    Attributes
    ----------
    dtypes
        Of its arguments; empty for what is no floating-point tensor.
    """

    name: str
    dtypes: list[str]
    backward: bool


class Recording:
    """Records from when it is made until `end`, or until the script profiles itself.

    Raises
    ------
    RuntimeError
        When it does already.
    """

    def __init__(self) -> None:
        self.gave_way = False
        self._profile = profiler.profile(record_shapes=True)
        self._patches = Patches()
        with _quietly():
            self._profile.__enter__()
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._patches.wrap(profiler, name, self._give_way)

    def end(self, wanted: Callable[[str], bool]) -> list[Executed]:
        """Stop, and give the operations that are wanted by their names.

        Of one inside of another the inner one. Nothing, if it gave way.
        """
        if self.gave_way:
            return []
        self._stop()
        found: list[Executed] = []
        results: Any = self._profile.kineto_results
        _collect(results.experimental_event_tree(), wanted, found, backward=False)
        return found

    def _give_way(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        self.gave_way = True
        self._stop()
        return real(*args, **kwargs)

    def _stop(self) -> None:
        self._patches.undo()
        with _quietly():
            self._profile.__exit__(None, None, None)


def is_profiled() -> bool:
    """Whether somebody is profiling."""
    return torch.autograd._profiler_enabled()


def _collect(
    events: Iterable[Any], wanted: Callable[[str], bool], found: list[Executed], *, backward: bool
) -> bool:
    """Add the operations in a tree of events that are wanted; whether there are any."""
    before = len(found)
    for each in events:
        inside = backward or each.name.startswith(_BACKWARD)
        space, _, name = each.name.rpartition("::")
        outer = _collect(each.children, wanted, found, backward=inside)
        if not outer and space == "aten" and wanted(name):
            found.append(Executed(name, list(map(_dtype, each.typed[1].inputs)), inside))
    return len(found) > before


def _dtype(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else ""


@contextmanager
def _quietly() -> Generator[None]:
    """Nothing is written to standard error: the profiler says there that it begins and ends."""
    saved = -1
    with suppress(OSError, ValueError):  # a script may have closed it
        sys.stderr.flush()
        saved = os.dup(_STDERR)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _STDERR)
        os.close(null)
    try:
        yield
    finally:
        if saved >= 0:
            os.dup2(saved, _STDERR)
            os.close(saved)
