"""# weights-through-half

## What it does
Reports a network that is put through `.half()` (or `.bfloat16()`) and back by `.float()` in one
function, and checkpoints to resume from (with the optimizer's state) whose weights or average are
halved. Silent for a copy.

## Why is this bad
`module.half()` changes the module itself, and what 11 bits cannot hold is gone: `.float()` brings
the dtype back, not the values. An average moves by less than that a step (1 - 0.9999), so it stands
still or jumps; a resumed training begins at other weights than the ones it stopped with.

## Example
    ema.half()
    validate(ema)
    ema.float()

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        validate(ema)

## Fix safety
No automatic fix: a copy takes memory, and files that hold float32 are twice as large.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.edits import file_of
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import HALVES
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import assignments, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import HALF
from ampwise_lint.values.abstract import DictValue, Optimizer, Parameters, Tensor, is_low
from ampwise_lint.values.events import Save


@rule("AMP221", "weights-through-half", "warning", triggers=(HALF,))
def check(code: Analysis) -> Iterator[Mistake]:
    yield from _through_half(code.module)
    for save in code.of(Save):
        made = save.mapping.node if save.mapping is not None else None
        half = _resumable_half(made) if isinstance(made, ast.Dict) else None
        home = file_of(half, save, code) if half is not None else None
        place = (half, home) if half is not None and home is not None else None
        if place is None and save.mapping is not None:
            place = _half_state(save.mapping)
        if place is not None:
            yield Mistake(
                *place,
                "a checkpoint that holds the optimizer's state is there to go on from, but its "
                "weights are rounded to 16 bits: training resumes at other weights; save float32, "
                "and halve what is handed out",
            )


def _through_half(module: Module) -> Iterator[Mistake]:
    """Networks that are cast down and up again."""
    if ".float()" not in module.source.text:
        return
    calls = [each for each in module.index.of(ast.Call) if isinstance(each.func, ast.Attribute)]
    back = {_owner(each): each for each in calls if _is_in_place(module, each, ("float",))}
    for call in calls:
        later = back.get(_owner(call))
        if later is None or not _is_in_place(module, call, HALVES) or later.lineno <= call.lineno:
            continue
        scope = scope_of(module, call)
        one_way = scope is scope_of(module, later) and not _exclude(module, call, later)
        if one_way and not _is_copy(scope, _owner(call)):
            yield Mistake(
                call,
                module,
                "the weights themselves are rounded to 16 bits and cast back: what was lost stays "
                "lost, and an average of weights stands still; run it under autocast, or halve a "
                "copy",
            )


def _exclude(module: Module, one: ast.AST, other: ast.AST) -> bool:
    """Whether two nodes stand in different branches of one ``if``."""
    ways = dict(_branches(module, one))
    return any(ways.get(key, way) is not way for key, way in _branches(module, other))


def _branches(module: Module, node: ast.AST) -> Iterator[tuple[int, bool]]:
    """Each ``if`` around a node, by ``id``, and whether the node stands in its ``else``."""
    while (around := module.parents.get(id(node))) is not None:
        if isinstance(around, ast.If):
            yield id(around), node in around.orelse
        node = around


def _owner(call: ast.Call) -> str:
    return dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_in_place(module: Module, call: ast.Call, names: Collection[str]) -> bool:
    """``network.half()`` as a statement, or of one that is used as a network."""
    owner = _owner(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in names or call.args:
        return False
    around = module.parents[id(call)]
    alone = isinstance(around, ast.Expr) or (isinstance(around, ast.IfExp) and names is HALVES)
    return bool(owner) and alone and (module.roles.is_network(owner) or "ema" in owner)


def _is_copy(scope: ast.AST, name: str) -> bool:
    made = [each.value for each in assignments(scope, name) if each.value is not None]
    return any("copy" in ast.unparse(each) for each in made)


def _half_state(mapping: DictValue) -> tuple[Node, Module] | None:
    """The cast of weights that are saved with an optimizer's state: ``{k: v.half() for ...}``."""
    states = [each.of for each in mapping.items.values() if isinstance(each, Parameters)]
    if not any(isinstance(each, Optimizer) for each in states):
        return None
    tensors = [each for each in mapping.items.values() if isinstance(each, Tensor)]
    casts = [each.cast for each in tensors if each.cast is not None and is_low(each.dtype)]
    return (casts[0].node, casts[0].module) if casts else None


def _resumable_half(made: ast.Dict) -> Node | None:
    """The cast of weights in a dict that has an optimizer's state, too."""
    named = [
        (str(getattr(key, "value", "")), value)
        for key, value in zip(made.keys, made.values, strict=True)
    ]
    if not any("optim" in key and not isinstance(e, ast.Constant) for key, e in named):
        return None
    halves = [
        each
        for key, value in named
        if "optim" not in key
        for each in ast.walk(value)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in HALVES
        and not each.args
    ]
    return halves[0] if halves else None
