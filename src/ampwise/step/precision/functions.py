"""Torch functions that run in float32 wherever they are called: ``islands=softmax()``.

They are seen by a torch-function mode, in place while a step's forward or backward runs. It sees
what code calls, not what torch calls inside its own functions: attention within
`nn.MultiheadAttention` is kept in float32 by that module's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampwise.errors import PolicyError, nearest
from ampwise.step.precision.base import Part
from ampwise.step.precision.islands import call_in_float32
from ampwise.step.warn import warn_user

_HOMES = (torch.nn.functional, torch, Tensor, torch.linalg, torch.special)

_Function = Callable[..., Any]


class CallMode(TorchFunctionMode):
    """A torch-function mode that holds in backward, too: checkpointing runs forward again there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.backward:
            with self:
                return _backward(args[0], **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; as it is, here."""
        return func(*args, **kwargs)


class Calls(CallMode):
    """Notes which functions are called.

    Attributes
    ----------
    unseen
        Names of those that were not, so far.

    Raises
    ------
    PolicyError
        When torch has no function of a name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._functions = functions_named(names)
        self.unseen = list(names)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call."""
        name = self._functions.get(func)
        if name is None:
            return func(*args, **kwargs)
        if name in self.unseen:
            self.unseen.remove(name)
        return self.make(func, args, kwargs)

    def make(self, func: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of one of the functions; as it is, here."""
        return func(*args, **kwargs)


class FunctionIslands(Calls, Part):
    """Runs some functions in float32.

    Parameters
    ----------
    names
        Of the functions; the errors are those of `Calls`.
    device_type
        Whose autocast is off inside.
    """

    def __init__(self, names: Sequence[str], device_type: str) -> None:
        super().__init__(names)
        self._device_type = device_type
        self._windows = 0

    def make(self, func: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In float32. No function is made here: torch 2.11 compiles none that is marked."""
        return call_in_float32(func, self._device_type, args, kwargs)

    def enter(self) -> None:
        """Watch calls."""
        self.__enter__()

    def leave(self) -> None:
        """Watch no more."""
        self.__exit__(None, None, None)

    def begin_window(self, *, anew: bool) -> None:  # noqa: ARG002
        """Say so, once, if the first window called none of a name."""
        self._windows += 1
        if self._windows == 2 and self.unseen:
            unseen = ", ".join(f"{name}()" for name in self.unseen)
            warn_user(
                f"islands: the first step never called {unseen}, which was to be kept in float32; "
                "calls inside torch's own functions are not seen: name a module"
            )


def functions_named(names: Sequence[str]) -> dict[_Function, str]:
    """Names of functions, by function; of each name all that torch has, operators too.

    Raises
    ------
    PolicyError
        When there is none: a typo would otherwise protect nothing, silently.
    """
    found: dict[_Function, str] = {}
    for name in names:
        spellings = (name, f"__{name}__", f"__r{name}__")
        all_found = (getattr(home, each, None) for home in _HOMES for each in spellings)
        own = [each for each in all_found if callable(each)]
        if not own:
            known = [each for home in _HOMES for each in dir(home) if not each.startswith("_")]
            raise PolicyError(
                f"islands: torch has no function {name}(){nearest(name, known)}; expected one of "
                "torch, torch.nn.functional or a tensor's method, or a module's name without ()"
            )
        found |= dict.fromkeys(own, name)
    return found


def _backward(
    loss: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor] | None, **kwargs: Any
) -> None:
    """`Tensor.backward` with function modes left on: on gradient edges they do not take it over."""
    edge = torch.autograd.graph.get_gradient_edge
    seed = torch.ones_like(loss) if gradient is None else gradient
    leaves = None if inputs is None else [edge(each) for each in inputs]
    torch.autograd.backward(edge(loss), seed, inputs=leaves, **kwargs)
