"""# misaligned-dimension

## What it does
Reports literal widths above 64 that are no multiple of 8, in Linear, Embedding, Conv, LSTM and
GRU layers of files that train in mixed precision. Narrower layers cost too little to matter, and
how many classes or labels there are the data decides.

## Why is this bad
Eight 16-bit values are 16 bytes; rows of another length are not aligned to that. torch's own
compiler (Inductor's `pad_mm`) pads 16-bit matrix products to multiples of 8 where that pays. A
vocabulary of 50257 is the usual case: it sits in the largest product of the network.

## Example
    self.embed = nn.Embedding(50257, 768)
    self.out = nn.Linear(768, 50257)

## Use instead
    self.embed = nn.Embedding(50304, 768)
    self.out = nn.Linear(768, 50304)

## Fix safety
No automatic fix: the shapes of parameters change, and old checkpoints no longer load.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries import uses_amp
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Const, Model, Value
from ampwise_lint.values.events import Made

LAYER = re.compile(r"^torch\.nn\.(Linear|Embedding|Conv[123]d|LSTM|GRU)$")
NAMES = (
    ("#0", "in_features", "in_channels", "input_size"),
    ("#1", "out_features", "out_channels", "embedding_dim", "hidden_size"),
)
CLASSES = re.compile(r"(class(es)?|labels?|categories)$", re.IGNORECASE)
"""Widths that the data decides: as many as it has classes."""
SMALLEST = 64
"""Narrower layers (classes, image channels) cost too little to matter."""


@rule("AMP306", "misaligned-dimension", "info", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    for event in code.of(Made):
        layer = event.value
        if not isinstance(layer, Model) or not LAYER.match(layer.path):
            continue
        written = [_written(event.node, names) for names in NAMES]
        widths = [
            _width(layer.arguments, names)
            for names, node in zip(NAMES, written, strict=True)
            if isinstance(node, ast.Constant | ast.Name | ast.Attribute)
            and not CLASSES.search(dotted(node))
            and (layer.path != "torch.nn.Embedding" or names is not NAMES[0])
        ]
        odd = [each for each in widths if each is not None and each > SMALLEST and each % 8]
        if odd:
            yield Mistake(
                event.node,
                event.module,
                f"a width of {odd[0]} is no multiple of 8: tensor cores pad it or are not used, "
                f"and lower precision gains little; use {-(-odd[0] // 8) * 8}",
            )


def _written(call: Node, names: tuple[str, ...]) -> ast.expr | None:
    """The width as it is written: of a sum of other layers' widths nobody is free to choose."""
    if not isinstance(call, ast.Call):
        return None
    index = int(names[0][1:])
    named = [each.value for each in call.keywords if each.arg in names]
    return next(iter([*call.args[index : index + 1], *named]), None)


def _width(arguments: dict[str, Value], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = arguments.get(name)
        if isinstance(value, Const) and isinstance(value.value, int):
            return value.value
    return None
