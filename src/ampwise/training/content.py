"""What a checkpoint holds, in either form: nested containers of tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

SPREAD = ("model", "optimizer")
"""The parts whose tensors may be spread over ranks."""

Like = Callable[[str], Tensor | None]
"""The tensor of the current model or optimizer that one of a checkpoint will be put into, if it is
known: by its dotted name, such as ``model.0.weight`` or ``optimizer.state.0.exp_avg``."""


class DamageError(Exception):
    """A file of a checkpoint cannot be read; which, and why."""


def mapped(value: Any, change: Callable[[str, Tensor], object], name: str) -> Any:
    """A copy of nested containers, each tensor in it changed; `change` gets its dotted name."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        copied: Any = type(value)()
        for key, each in value.items():
            copied[key] = mapped(each, change, f"{name}.{key}")
        if hasattr(value, "_metadata"):  # versions of the modules in a model's state_dict
            copied._metadata = cast("Any", value)._metadata
        return copied
    if type(value) in (list, tuple):
        return type(value)(mapped(e, change, f"{name}.{i}") for i, e in enumerate(value))
    return value


def load_file(path: Path) -> Any:
    """What `torch.save` wrote: tensors and plain values only.

    Raises
    ------
    DamageError
        When it is missing, damaged, or holds anything else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DamageError(f"{path.name}: missing") from None
    except Exception as error:  # noqa: BLE001 - unpickling damage raises anything
        raise DamageError(f"{path.name}: {type(error).__name__}") from None
