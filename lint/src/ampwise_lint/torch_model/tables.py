"""Tables of a project that an option looks into: what it may choose on a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampwise_lint.source import library
from ampwise_lint.values.abstract import LOW, Class, DictValue, Model, Ref, Value
from ampwise_lint.values.classes import is_network

DTYPES = library.DTYPES.keys() | {f"torch.{each}" for each in library.TYPES}
MOST = 4
"""Networks or losses that paths try; of a longer table nothing is known, for want of time."""


def choices_in(table: DictValue) -> dict[Any, Value]:
    """Dtypes or classes of networks, by the keys that choose them; empty for other tables."""
    if table.open or not table.items:
        return {}
    return _dtypes_in(table) or _networks_in(table) or _losses_in(table)


def _dtypes_in(table: DictValue) -> dict[Any, Value]:
    """``{"fp16": torch.float16, "bf16": torch.bfloat16}``; integers are no dtypes to train in."""
    items = table.items
    if not all(isinstance(e, Ref) and e.path in DTYPES for e in items.values()):
        return {}
    paths = {k: e.path for k, e in items.items() if isinstance(e, Ref) and e.path in library.DTYPES}
    first = next(iter(paths), None)
    # Next to the first those of 16 bits: what a path may choose is asked in this order.
    order = sorted(paths, key=lambda k: k != first and library.DTYPES[paths[k]] not in LOW)
    return {key: items[key] for key in order}


def _losses_in(table: DictValue) -> dict[Any, Value]:
    """``{"ce": nn.CrossEntropyLoss, "bce": nn.BCELoss()}``."""
    return _few(table, _is_loss)


def _is_loss(value: Value) -> bool:
    is_layer = isinstance(value, Ref | Model)
    return is_layer and bool(library.LOSS_LAYERS.match(value.path))


def _networks_in(table: DictValue) -> dict[Any, Value]:
    """``{"conv": ConvBlock, "attention": AttentionBlock}``."""
    return _few(table, lambda each: isinstance(each, Class) and is_network(each))


def _few(table: DictValue, is_kind: Callable[[Value], bool]) -> dict[Any, Value]:
    """A table of values of a kind; empty for others, and for too many to try."""
    items = table.items
    return dict(items) if all(map(is_kind, items.values())) and len(items) <= MOST else {}
