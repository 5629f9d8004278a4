"""Where an operation comes from: module, the user's own line, and for backward the forward line.

Forward operations are placed by a stack of module hooks and a walk up the Python frames. A backward
operation runs under an autograd node, and the node was made by a forward operation: inside dispatch
its sequence number is one less than the thread's counter, if that has moved. Gradients of gradients
follow by the same rule, as their nodes are made in backward. Recomputed forwards (activation
checkpointing) run inside a backward node with gradients enabled, and have frames of their own.
A gradient that forward asks for (`torch.autograd.grad`) is a part of forward where that is wanted,
on the line that asks.
"""

from __future__ import annotations

import linecache
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn

import ampwise
from ampwise.step.compiled import eager

Phase = Literal["forward", "backward", "optimizer"]

_AUTOGRAD = str(Path(torch.__file__).parent / "autograd")
_INTERNAL = (str(Path(torch.__file__).parent) + "/",)
_OURS = str(Path(ampwise.__file__).parent) + "/"
_STEPS = tuple(
    _OURS + each for each in ("step/", "observe/replay.py", "numerics/updates/of_state.py")
)
"""Of our own files, those that run a step: what called them made none of its operations."""
_FORWARDS = _OURS + "step/precision/"
"""Of these, what runs in place of a module's forward."""
_USERLIKE = (_OURS + "tasks/", _OURS + "losses.py")
"""Of our own files, those that stand in for a user's: the built-in tasks."""
_LIBRARIES = tuple(
    {
        *(each + "/" for each in site.getsitepackages()),
        sysconfig.get_path("stdlib") + "/",
        sysconfig.get_path("platlib") + "/",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation was called.

    Attributes
    ----------
    phase
        ``forward`` or ``backward``; of a backward operation the rest is that of its forward.
    module
        FQN of the innermost module; "" for the root, and for the loss.
    call
        Which call of that module in this window, from 0.
    file, line
        The user's own.
    library
        ``file:line`` inside a library, where the innermost frame is one.
    function
        First line of the function that the line is in.
    inner
        Whether it is a part of a gradient that forward asks for.
    """

    phase: Phase
    module: str
    call: int
    file: str
    line: int
    library: str = ""
    function: int = 0
    inner: bool = False

    @property
    def source(self) -> str:
        """Text of the line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def file_line(self) -> tuple[str, int]:
        """File and line, to find what stands on the same one."""
        return self.file, self.line

    def line_from(self, origin: Place) -> str:
        """``line 7``; ``line 7 of model.py`` where that is another file than a place's."""
        line = f"line {self.line}"
        return line if self.file == origin.file else f"{line} of {Path(self.file).name}"


NOWHERE = Place("forward", "", 0, "", 0)


class Running(Protocol):
    """Knows which module is running."""

    @property
    def top(self) -> tuple[str, int]:
        """FQN and call of the innermost module."""
        ...


class ModuleStack:
    """Which module is running; entered around a replay."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = "" if len(models) == 1 else str(index)
            for name, module in model.named_modules():
                self._names.setdefault(
                    id(module), ".".join(each for each in (prefix, name) if each)
                )
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._handles: list[Any] = []

    @property
    def top(self) -> tuple[str, int]:
        """FQN and call of the innermost module."""
        return self._stack[-1]

    def __enter__(self) -> Self:
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._push),
            hooks.register_module_forward_hook(self._pop, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _push(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is None:  # made on the fly: it belongs to where it was made
            self._stack.append(self._stack[-1])
            return
        self._stack.append((name, self._calls[name]))
        self._calls[name] += 1

    def _pop(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()


def _next_node() -> int:
    """Sequence number that the next autograd node of this thread gets."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._get_sequence_nr()


class Places:
    """Finds the place of the operation that is being dispatched.

    Parameters
    ----------
    inner
        Whether gradients that forward asks for stand on the line that asks, not where forward made
        what they are of.
    """

    def __init__(self, modules: Running, *, inner: bool = False) -> None:
        self._modules, self._inner = modules, inner
        self._of_node: dict[int, Place] = {}
        self._next_node = _next_node()
        self._last = NOWHERE

    def here(self) -> Place:
        """The place, called from inside ``__torch_dispatch__``."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            # The step's own operations on the loss stand where the loss was computed.
            place = self._of_frames("forward") or self._last
            self._last = place
        else:
            place = self._in_backward(node)
        number = _next_node()
        for made in range(self._next_node, number):
            self._of_node[made] = place
        self._next_node = max(self._next_node, number)
        if node is not None and self._inner and (asks := _asking()) is not None:
            found = self._of_frames("forward", asks)
            return place if found is None else replace(found, inner=True)
        return place

    def _in_backward(self, node: Any) -> Place:
        if torch.is_grad_enabled() and (found := self._of_frames("forward")) is not None:
            return found  # a recomputed forward, or a user's backward that is differentiated again
        made_by = self._of_node.get(_number(node), NOWHERE)
        own = self._of_frames("backward")  # Python code of a custom Function's backward
        if own is not None:
            module, call = made_by.module, made_by.call
            return replace(own, module=module, call=call)
        return replace(made_by, phase="backward")

    def _of_frames(self, phase: Phase, frame: FrameType | None = None) -> Place | None:
        """Place of the innermost user's frame; None if the autograd engine is met first."""
        module, call = self._modules.top
        frame = frame or sys._getframe(2)
        library = ""
        while frame is not None:
            code = frame.f_code
            kind = kind_of(code.co_filename)
            if kind == "user":
                return Place(phase, module, call, code.co_filename, frame.f_lineno, library,
                             code.co_firstlineno)  # fmt: skip
            if kind == "library" and not library:
                library = f"{code.co_filename}:{frame.f_lineno}"
            if kind == "engine" and code.co_name == "_engine_run_backward":
                return None
            if kind == "step":
                break
            frame = frame.f_back
        if library:
            file, _, line = library.rpartition(":")
            return Place(phase, module, call, file, int(line), library)
        return None


def _asking() -> FrameType | None:
    """The call of `torch.autograd.grad` that the autograd engine runs for; None for a backward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and kind_of(frame.f_code.co_filename) != "engine":
        frame = frame.f_back
    while frame is not None and kind_of(frame.f_code.co_filename) == "engine":
        if frame.f_code.co_name == "grad":
            return frame.f_back
        frame = frame.f_back
    return None


def _number(node: Any) -> int:
    try:
        return node._sequence_nr()
    except AttributeError:
        return -1


@cache
def kind_of(file: str) -> Literal["user", "library", "internal", "engine", "step"]:
    """Whose code a file is."""
    if file.startswith(_AUTOGRAD):
        return "engine"
    if file.startswith(_INTERNAL) or file.startswith("<"):
        return "internal"
    if file.startswith(_STEPS) and not file.startswith(_FORWARDS):
        return "step"
    if file.startswith(_OURS):
        return "user" if file.startswith(_USERLIKE) else "internal"
    return "library" if file.startswith(_LIBRARIES) else "user"


@contextmanager
def placing(models: Sequence[nn.Module], *, inner: bool = False) -> Generator[Places]:
    """Context in which operations can be placed: eager, and backward runs in this thread.

    Parameters
    ----------
    inner
        As for `Places`.
    """
    with (
        eager(models),
        ModuleStack(models) as modules,
        torch.autograd.set_multithreading_enabled(mode=False),
    ):
        yield Places(modules, inner=inner)


def parts(place: Place) -> Mapping[str, Any]:
    """A place as plain values."""
    return {
        "module": place.module,
        "call": place.call,
        "file": place.file,
        "line": place.line,
        "source": place.source,
        "library": place.library,
    }


def is_internal(file: str) -> bool:
    """Whether a file is neither the user's nor a library's."""
    return kind_of(file) not in ("user", "library")
