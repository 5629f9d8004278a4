"""What values hold, and what they were computed of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampwise_lint.values.abstract import (
    ListValue,
    Loader,
    Model,
    Optimizer,
    Scaler,
    Tensor,
    Unknown,
    Value,
)

ONE_BY_ONE = 8
"""Of what a container holds, as much is walked one by one: by loops, comprehensions, functions."""


def flatten(values: Sequence[Value]) -> list[Value]:
    """Values with lists of values opened."""
    flat: list[Value] = []
    for each in values:
        if isinstance(each, ListValue):
            flat += flatten(each.items)
        else:
            flat.append(each)
    return flat


def loaders_in(value: Value | None) -> Iterator[Loader]:
    """The loaders that a loop over something reads: ``enumerate(tqdm(loader))``, ``zip(a, b)``."""
    match value:
        case Loader():
            yield value
        case Unknown(op="enumerate" | "tqdm" | "zip", operands=operands):
            for each in operands:
                yield from loaders_in(each)
        case _:
            pass


def modules_in(value: Value) -> list[Value]:
    """What a ``ModuleList`` or ``Sequential`` holds; empty for anything else."""
    inner = value.inner if isinstance(value, Model) and not value.wrapped else None
    return flatten(inner.items) if isinstance(inner, ListValue) else []


def holds(value: Value, inner: ListValue) -> bool:
    """Whether a list is in a value, or is that value."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if each is inner:
            return True
        if isinstance(each, ListValue) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.items
    return False


def origins(*tensors: Value) -> Iterator[Tensor]:
    """Some tensors, and all those they were computed of."""
    waiting = list(tensors)
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += flatten(each.inputs)


def are_parts(values: Sequence[Value]) -> bool:
    """Whether these are parts of a training that differ, an optimizer or a scaler among them."""
    kinds = {type(each) for each in values}
    return len(kinds) > 1 and bool(kinds & {Optimizer, Scaler})
