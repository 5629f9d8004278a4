"""Batches are tensors in any nesting of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device | str, *, non_blocking: bool = True) -> Any:
    """The same nesting with every tensor on `device`; what holds no tensor passes through.

    `non_blocking` holds for copies to accelerators. A copy to the host is waited for, because
    nothing later would wait before the values are read.
    """
    target = torch.device(device)
    non_blocking = non_blocking and target.type != "cpu"

    def move(leaf: Any) -> Any:
        try:
            return leaf.to(target, non_blocking=non_blocking)
        except TypeError:  # its own `to`, without that option
            return leaf.to(target)

    return changed(batch, move)


def pin(batch: Any) -> Any:
    """The same nesting with every CPU tensor in pinned memory, from where copies overlap."""

    def pinned(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            fits = leaf.device.type == "cpu" and leaf.layout is torch.strided
            return leaf.pin_memory() if fits else leaf
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf

    return changed(batch, pinned)


def clone(batch: Any) -> Any:
    """The same nesting with a copy of every tensor."""
    return changed(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def joined(batches: Sequence[Any]) -> Any:
    """Batches of one nesting as one, tensors joined along their first dimension.

    Raises
    ------
    TypeError
        When a batch holds something that has no first dimension, or moves itself.
    """
    columns = [list(leaves(batch)) for batch in batches]

    def join(leaf: Any) -> Any:
        parts = [column.pop(0)[1] for column in columns]
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise TypeError(f"batches cannot be joined: they hold {type(leaf).__name__} scalars")
        return torch.cat(parts)

    return changed(batches[0], join)


def leaves(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path, such as ``batch['image']`` or ``batch[0].mask``."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from leaves(value, f"{path}[{index}]")
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif _is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name), f"{path}.{field.name}")


def tensors(batch: Any) -> list[Tensor]:
    """Every tensor."""
    return [batch] if isinstance(batch, Tensor) else [each for _, each in leaves(batch)]


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with every tensor (or thing that moves itself) changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        entries = {key: changed(each, change) for key, each in value.items()}
        return _like(value, entries) if type(value) is not dict else entries
    if hasattr(value, "to") and not isinstance(value, type):
        return change(value)  # something that moves itself, such as a PackedSequence or a graph
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(changed(each, change) for each in value)
    if _is_dataclass(value):
        return _changed_dataclass(value, change)
    return value


def _like(original: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the original type, with what else it carries (a factory, say)."""
    if not isinstance(original, MutableMapping):
        return changed
    clone: Any = copy.copy(original)
    for key, value in changed.items():
        clone[key] = value
    return clone


def _changed_dataclass(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with the fields changed; the constructor, and its checks, are not run again."""
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(clone, field.name, changed(getattr(value, field.name), change))
    return clone


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
