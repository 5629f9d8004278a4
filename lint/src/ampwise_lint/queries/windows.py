"""Windows of accumulation: several backwards before a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Trace
from ampwise_lint.queries.branches import is_rare
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import functions_of, is_inside
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted, leaves
from ampwise_lint.values.contents import origins
from ampwise_lint.values.events import (
    Backward,
    Event,
    Forward,
    OptimizerStep,
    ScalerStep,
    ZeroGrad,
    without_iteration,
)

FAULT = re.compile(r"is_?nan|is_?inf(?!erence)|found_inf|has_nan|(?<!no_)overflow", re.IGNORECASE)
"""Conditions that hold when a step went wrong."""
SOUND = re.compile(r"is_?finite|all_?finite|no_overflow", re.IGNORECASE)
"""Conditions that hold when it did not."""


def accumulates(trace: Trace) -> Iterator[tuple[Backward, ScalerStep | OptimizerStep]]:
    """Each backward that runs more often than the step behind it, with that step."""
    if any((FAULT if taken else SOUND).search(key) for key, taken in trace.decided.items()):
        return  # a step that went wrong is left out, which makes no window
    for index, event in enumerate(trace.events):
        if not isinstance(event, Backward) or not (event.context.loops or trace.root):
            continue  # a function that is walked by itself may be called once a micro-batch
        step = next(
            (e for e in trace.events[index:] if isinstance(e, ScalerStep | OptimizerStep)), None
        )
        if step is None or not (_is_deeper(event, step) or _is_rarer(trace, event, step)):
            continue
        if not _is_thrown_away(trace, event, step):
            yield event, step


COPIES = ("copy.copy", "copy.deepcopy")
PARAMETERS = ("parameters", "named_parameters")


def _is_thrown_away(trace: Trace, backward: Backward, step: Event) -> bool:
    """Whether gradients are those of a copy that ends with its function, as an adversary's.

    Nobody steps on them; what is looked for is the gradient of an input.
    """
    module = backward.module
    function = next(iter(functions_of(module, backward.node)), None)
    if function is None or any(is_inside(e.module, e.node, function) for e in step.way):
        return False
    copies = _copies_only_run(module, function)
    if not copies:
        return False
    origin = {id(each.node) for each in origins(backward.tensor)}
    runs = [each.node for each in trace.of(Forward) if each.is_root and id(each.node) in origin]
    return bool(runs) and all(dotted(getattr(each, "func", each)) in copies for each in runs)


def _copies_only_run(module: Module, function: Node) -> set[str]:
    """Names of copies whose parameters a function takes nowhere: it hands them to nobody."""
    copies: set[str] = set()
    others: set[str] = set()
    for each in ast.walk(function):
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made)):
                if module.imports.full(made) in COPIES:
                    copies.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                match module.parents[id(each)]:
                    case ast.Attribute(attr=attr) if attr not in PARAMETERS:
                        pass
                    case ast.Call(func=called) if called is each:
                        pass
                    case ast.Call(func=called) if module.imports.full(called) in COPIES:
                        pass
                    case _:
                        others.add(name)
            case _:
                pass
    return copies - others


def zeroed_with(trace: Trace, backward: Backward) -> Iterator[ZeroGrad]:
    """What zeroes gradients each time a backward runs, in the loop around it."""
    around = [each.serial for each in backward.context.loops[-1:]]
    for event in trace.of(ZeroGrad):
        inner = event.context.loops[-1:]
        if [each.serial for each in inner] != around or event.context.is_periodic:
            continue
        loop = inner[0].node if inner else None
        rare = (is_rare(each, loop, event.module) for each in event.context.branches)
        if not any(rare) and not gives_up(event, backward):
            yield event


def gives_up(zero: ZeroGrad, backward: Backward) -> bool:
    """Whether it stands in a branch behind the backward that leaves the iteration."""
    around = {id(each.node) for each in backward.context.conditions}
    return any(
        isinstance(each.node, ast.If)
        and id(each.node) not in around
        and leaves(each.node.body if each.taken else each.node.orelse)
        for each in zero.context.branches
    )


def _is_deeper(event: Event, step: Event) -> bool:
    """A loop around the one, inside the loops around the other."""
    nodes = [each.node for each in step.context.loops]
    inner = [each.node for each in event.context.loops]
    return len(inner) > len(nodes) and inner[: len(nodes)] == nodes and bool(nodes)


def _is_rarer(trace: Trace, event: Event, step: Event) -> bool:
    """The step waits for the end of a window that the backward does not wait for."""
    inner = [each.node for each in event.context.loops[-1:]]
    if [each.node for each in step.context.loops[-1:]] != inner:
        return False
    held = {each.asked for each in event.context.conditions}
    return any(each.periodic and each.asked not in held for each in step.context.branches) or (
        _skipped_to(event, step) and not _left_out(trace, step)
    )


def _skipped_to(event: Event, step: Event) -> bool:
    """The step is reached in a later iteration than the backward: a ``continue`` went before."""
    return [each.serial for each in event.context.loops[-1:]] != [
        each.serial for each in step.context.loops[-1:]
    ]


def _left_out(trace: Trace, step: Event) -> bool:
    """An earlier step was left out by a condition that asks for no end of a window."""
    waits = {e.asked: e.taken for e in step.context.branches if not e.periodic}
    return any(
        waits.get(without_iteration(key), taken) is not taken
        for key, taken in trace.decided.items()
    )
