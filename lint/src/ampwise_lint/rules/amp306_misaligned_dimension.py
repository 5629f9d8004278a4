"""# misaligned-dimension

## What it does
Reports literal widths above 64 that are no multiple of 8, in Linear, Embedding, Conv, LSTM and
GRU layers of files that train in mixed precision. Narrower layers cost too little to matter. Left
to the data is what it decides: numbers of classes, labels, landmarks and the like by the names they
come through (`num_classes`, `label_dim`), the last layer of what is called a classifier or a head,
and what a network takes in and gives out where a default or a constant of such a name says it
(`in_channels=130`). What is computed is left, too.

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
from dataclasses import dataclass

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.precision import uses_amp
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node, defaults_of
from ampwise_lint.source.places import assignments, bound_in, bound_to, class_of, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Const, Model, Value
from ampwise_lint.values.events import Made, Site

LAYER = re.compile(r"^torch\.nn\.(Linear|Embedding|Conv[123]d|LSTM|GRU)$")
NAMES = (
    ("#0", "in_features", "in_channels", "input_size"),
    ("#1", "out_features", "out_channels", "embedding_dim", "hidden_size"),
)
COUNTED = re.compile(
    r"class|cls(?![a-z])|label|categor|species|speaker|(^|_)tags?(_|$)|landmark|keypoint|joint|coord"
    r"|sensor|electrode|(?<![a-z])gene(s|_)|(?<![a-z])action|(^|_)obs|target|(user|item|bin|mel)s?"
    r"(_|$)",
    re.IGNORECASE,
)
"""What the data has so many of, or how much of it is measured."""
ENDS = re.compile(
    r"^(in|out|input|output|n|num)_?(dims?|features?|feats?|size|channels?|chans?|ch|width"
    r"|outputs?|inputs?)$",
    re.IGNORECASE,
)
"""What goes into a network and what comes out of it."""
CLASSIFIER = re.compile(r"classif|(^|_)cls|(^|_)fc\d*$|(?<!lm_)head|logits?$", re.IGNORECASE)
"""Layers the last of which has an output for each class."""
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
            if node is not None
            and not _is_of_data(event, node)
            and (names is NAMES[0] or not _ends_classifier(event))
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


@dataclass(frozen=True, slots=True)
class _Step:
    """One of the expressions that a width comes through, from a layer back to its number."""

    node: ast.expr
    module: Module
    sites: tuple[Site, ...]
    """The calls that lead to where it stands."""
    is_given: bool = False
    """A call hands it to a parameter."""


STEPS = 8
"""Names in a row that are followed."""


def _is_of_data(event: Made, width: ast.expr) -> bool:
    """Whether the data decides a width, by the names it comes through, or something computes it."""
    step: _Step | None = _Step(width, event.module, event.context.sites)
    name = ""
    for _ in range(STEPS):
        if step is None:
            break
        if step.is_given:
            name = ""  # what a block calls its widths says nothing of them
        if not isinstance(step.node, ast.Constant):
            name = _last_name(step.node)
            if not name or COUNTED.search(name):
                return True
        step = _before(step)
    return bool(ENDS.match(name))


def _last_name(node: ast.expr) -> str:
    """``classes`` of ``config.classes`` and ``config["classes"]``; empty for what is computed."""
    match node:
        case ast.Name() | ast.Attribute():
            return dotted(node).rpartition(".")[2]
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case _:
            return ""


def _before(step: _Step) -> _Step | None:
    """Where the value of a name comes from; None where that is the end, or not in sight."""
    node, module = step.node, step.module
    name = dotted(node)
    if isinstance(node, ast.Attribute) and name.startswith("self."):
        class_ = class_of(module, node)
        made = assignments(class_, name) if class_ is not None else []
        if not made or made[-1].value is None:
            return None
        moved = scope_of(module, made[-1]) is not scope_of(module, node)
        return _Step(made[-1].value, module, step.sites[:-1] if moved else step.sites)
    if not isinstance(node, ast.Name):
        return None
    scope = scope_of(module, node)
    made = assignments(scope, name)
    if made and made[-1].value is not None:
        return _Step(made[-1].value, module, step.sites)
    if isinstance(scope, ast.FunctionDef) and name in bound_in(scope):
        return _handed(step, scope, name)
    made = assignments(module.tree, name) if scope is not module.tree else []
    return _Step(made[-1].value, module, ()) if made and made[-1].value is not None else None


def _handed(step: _Step, function: ast.FunctionDef, name: str) -> _Step | None:
    """What a parameter is given by the call that leads there, or else its default."""
    site = step.sites[-1] if step.sites else None
    call = site.node if site is not None else None
    if site is not None and isinstance(call, ast.Call):
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if class_of(step.module, function) is not None:
            parameters = parameters[1:]
        given = dict(zip(parameters, call.args, strict=False))
        given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
        if name in given:
            return _Step(given[name], site.module, step.sites[:-1], is_given=True)
    default = defaults_of(function.args).get(name)
    return None if default is None else _Step(default, step.module, step.sites[:-1])


def _ends_classifier(event: Made) -> bool:
    """Whether it is the last layer of ``self.classifier``, alone or in a Sequential."""
    node: ast.AST = event.node
    module = event.module
    while isinstance(around := module.parents.get(id(node)), ast.Call) and around.args[-1:] == [
        node
    ]:
        node = around
    is_bound = isinstance(around, ast.Assign) and around.value is node
    return is_bound and any(
        CLASSIFIER.search(each.rpartition(".")[2]) for each in bound_to(module, node)
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
