"""What a checkpoint holds, in either form: nested containers of tensors and plain values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ampwise.document import MAX_INT, regular

SPREAD = ("model", "optimizer")
"""The parts whose tensors may be spread over ranks."""

Like = Callable[[str], Tensor | None]
"""The tensor of the current model or optimizer that one of a checkpoint will be put into, if it is
known: by its dotted name, such as ``model.0.weight`` or ``optimizer.state.0.exp_avg``."""


class DamageError(Exception):
    """A file of a checkpoint cannot be read; which, and why."""


_PARTS = ("step", *SPREAD, "config", "rng", "position")


def checked(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint, if it has all parts and they are of the right kinds.

    Raises
    ------
    DamageError
        When it does not, or they are not; which.
    """
    for part in _PARTS:
        _check(part, content.get(part), isinstance(content.get(part), dict), "entries by name")
    config, position = content["config"], content["position"]
    for name in ("task", "precision"):
        _check(f"config.{name}", config.get(name), isinstance(config.get(name), str), "text")
    step = content["step"]
    totals = ("skipped", "growths", "backoffs", "skipped_in_a_row", "held")
    counts = {"step.steps": step.get("steps"), "config.seed": config.get("seed")}
    counts |= {f"step.{name}": step.get(name, 0) for name in totals}
    counts |= {f"position.{name}": position.get(name) for name in ("epoch", "batch")}
    counts |= {"position.samples": position.get("samples", 0)}
    counts |= {"world_size": content.get("world_size", 1)}
    for name, value in counts.items():
        # Not a seed: it may be negative.
        fits = type(value) is int and (name == "config.seed" or value >= 0) and value < MAX_INT
        _check(name, value, fits, "a count")
    rng = position.get("epoch_rng")
    _check("position.epoch_rng", rng, rng is None or isinstance(rng, dict), "entries by name")
    return content


def check_alike(value: Any, like: Any, name: str) -> None:
    """Refuse a setting of a checkpoint that could not stand where one of now stands.

    Raises
    ------
    DamageError
        When their kinds are not the same, or it is a number that is not finite.
    """
    if like is None or isinstance(like, str):
        _check(name, value, value is None or isinstance(value, str | bool | int | float), "a value")
    elif isinstance(like, bool):
        _check(name, value, value is None or isinstance(value, bool | int), "true or false")
    elif isinstance(like, int | float) or (isinstance(like, Tensor) and like.numel() == 1):
        _check(name, value, _is_number(value, like), "a number")
    elif isinstance(like, tuple | list):
        expected, given = cast("list[Any]", like), cast("list[Any]", value)
        fits = isinstance(value, tuple | list) and len(given) == len(expected)
        _check(name, value, fits, f"{len(expected)} values")
        for number, pair in enumerate(zip(given, expected, strict=True)):
            check_alike(*pair, f"{name}.{number}")
    elif isinstance(like, dict):
        _check(name, value, isinstance(value, dict), "entries by name")
        for key, each in cast("dict[str, Any]", like).items():
            if key in value:
                check_alike(value[key], each, f"{name}.{key}")


def _is_number(value: Any, like: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < MAX_INT
    return isinstance(value, float) and (math.isfinite(value) or not math.isfinite(like))


def _check(name: str, value: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise DamageError(f"{name}: expected {expected}, got {reprlib.repr(value)}")


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
        return torch.load(regular(path), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DamageError(f"{path.name}: missing") from None
    except OSError as error:
        raise DamageError(f"{path.name}: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 - unpickling damage raises anything
        raise DamageError(f"{path.name}: {type(error).__name__}") from None
