"""Islands: modules that run in float32 although the policy computes in 16 bits.

Inside an island autocast is off and 16-bit inputs are raised to float32. An island is entered by
way of its module's ``forward`` (`placed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ampwise.errors import PolicyError
from ampwise.step.members import Members
from ampwise.step.modules import modules_of
from ampwise.step.precision.placed import Forward, Placed

_UNCOVERED: Mapping[tuple[str, str], tuple[type[nn.Module], ...]] = {
    ("cpu", "bfloat16"): (nn.Bilinear,),
    ("cpu", "float16"): (nn.Bilinear, nn.RReLU),
}
"""Modules, by device and dtype, that get mixed dtypes from autocast, or have no kernel."""


class Islands(Placed):
    """Runs modules in float32.

    Parameters
    ----------
    find
        Gives the islands as they are now.
    device_type
        Whose autocast is off inside.
    """

    def __init__(self, find: Callable[[], Sequence[nn.Module]], device_type: str) -> None:
        super().__init__(find)
        self._device_type = device_type

    def instead(self, module: nn.Module, forward: Forward) -> Forward:  # noqa: ARG002
        """A module's forward in float32."""
        return in_float32(forward, self._device_type)


def is_island(forward: Forward) -> bool:
    """Whether a module's forward is that of an island."""
    return getattr(forward, "is_island", False)


class Found:
    """The islands of models; looked for anew when models change.

    They are the modules whose name matches a pattern, and those that autocast leaves in a format
    they cannot compute in.

    Parameters
    ----------
    patterns
        Of module names (`fnmatch`).
    device_type, dtype
        Kind of device of the models, and what autocast computes in there.
    members
        What is trained.
    """

    def __init__(
        self, patterns: Sequence[str], device_type: str, dtype: str, members: Members
    ) -> None:
        self._patterns, self._device_type, self._dtype = patterns, device_type, dtype
        self._members = members
        self._version = -1
        self._found: list[nn.Module] = []

    def __call__(self) -> list[nn.Module]:
        """The modules; the errors are those of `islands_of`."""
        if self._version != self._members.version:
            given = self._patterns, self._device_type, self._dtype
            self._found = islands_in(self._members.whole, *given)
            self._version = self._members.version
        return self._found


def islands_in(
    model: nn.Module, patterns: Sequence[str], device_type: str, dtype: str
) -> list[nn.Module]:
    """The islands of a model: those named, and those that autocast does not cover.

    Raises
    ------
    PolicyError
        As `islands_of`.
    """
    uncovered = _UNCOVERED.get((device_type, dtype), ())
    found = [each for each in modules_of([model]) if isinstance(each, uncovered)]
    return list(dict.fromkeys([*islands_of(model, patterns), *found]))


def islands_of(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The submodules whose name matches a pattern; compiled ones by the name they had before.

    Raises
    ------
    PolicyError
        When a pattern matches no module: a typo would otherwise protect nothing, silently. When it
        matches a scripted one, whose code cannot be changed from outside.
    """
    named = module.named_modules() if patterns else ()
    names = {name.replace("_orig_mod.", ""): each for name, each in named}
    found: list[nn.Module] = []
    for pattern in patterns:
        matching = {
            name: each for name, each in names.items() if name and fnmatchcase(name, pattern)
        }
        if not matching:
            raise PolicyError(
                f"islands: no module matches {pattern!r}; modules are named like "
                f"{', '.join(list(names)[1:4]) or 'nothing: the model has no submodules'}"
            )
        for name, each in matching.items():
            if isinstance(each, torch.jit.ScriptModule):
                raise PolicyError(
                    f"islands: {name} is a scripted module, which keeps its own code; switch "
                    "autocast off inside it, or use the module it was made from"
                )
        found += [each for each in matching.values() if each not in found]
    return found


def in_float32(forward: Forward, device_type: str) -> Forward:
    """A function as it runs in an island: without autocast, on 16-bit inputs raised to float32."""

    def island(*args: Any, **kwargs: Any) -> Any:
        return call_in_float32(forward, device_type, args, kwargs)

    vars(island)["is_island"] = True
    return island


def call_in_float32(
    function: Forward, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function without autocast, on 16-bit inputs raised to float32."""
    with torch.autocast(device_type, enabled=False):
        return function(*tree_map(raised, args), **tree_map(raised, kwargs))


def raised(value: Any) -> Any:
    """A 16-bit tensor in float32, anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
