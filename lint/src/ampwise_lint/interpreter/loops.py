"""Loops: how often they are walked, and over what.

A loop is walked twice, as a window of two micro-batches: the first time ``(i + 1) % n == 0`` does
not hold, the second time it does. One around it is walked again only where that may show more.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ampwise_lint.interpreter.items import element
from ampwise_lint.path.state import Flow, State
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import LOADER, dotted
from ampwise_lint.torch_model.python_functions import is_loader
from ampwise_lint.values.abstract import (
    Const,
    DictValue,
    Instance,
    ListValue,
    Loader,
    Optimizer,
    Scaler,
    Unknown,
    Value,
)
from ampwise_lint.values.contents import ONE_BY_ONE, are_parts, loaders_in
from ampwise_lint.values.events import (
    Backward,
    Managed,
    OptimizerStep,
    Read,
    ScalerStep,
    Unscale,
    Update,
    ZeroGrad,
)

STEP_EVENTS = (Backward, ScalerStep, OptimizerStep, Update, Unscale, ZeroGrad, Managed)


def _for(state: State, node: ast.For | ast.AsyncFor) -> Flow:
    over = state.evaluate(node.iter)
    return _loop(state, node, node.body, node.target, over)


def _while(state: State, node: ast.While) -> Flow:
    state.evaluate(node.test)
    return _loop(state, node, node.body, None, None)


def _loop(
    state: State, node: ast.stmt, body: list[ast.stmt], target: ast.expr | None, over: Value | None
) -> Flow:
    _forget(state, node, body)
    over_data = _is_data(state.here, node, over)
    steps = len(state.trace)
    flow: Flow = ""
    parts = _parts_with_state(over)
    before = _step_makers(state)
    for iteration in range(max(2, parts)):
        with state.in_iteration(node, iteration, over_data=over_data):
            for loader in loaders_in(over):
                state.emit(Read, node, loader)
            if target is not None:
                state.assign(target, element(state, node, target, over, over_data))
            flow = state.execute(body)
        if flow in ("return", "raise", "break"):
            break
        again = parts or _steps_in(state, node, steps) or _is_phases(over)
        again = again or _are_remade(before, state)
        if flow != "continue" and not again:
            break
    orelse: list[ast.stmt] = getattr(node, "orelse", [])
    if flow in ("return", "raise"):
        return flow if not state.unsure else ""
    return state.execute(orelse) if orelse and flow != "break" else ""


def _parts_with_state(over: Value | None) -> int:
    """How many parts a loop runs over that differ, an optimizer or a scaler among them."""
    match over:
        case Unknown(op="items", operands=(DictValue(items=known, open=False), *_)):
            values = list(known.values())
        case ListValue(items=values, repeats=False):
            pass
        case _:
            return 0
    return min(len(values), ONE_BY_ONE) if are_parts(values) else 0


def _step_makers(state: State) -> dict[str, Value]:
    """The optimizers and scalers that the names of a function stand for."""
    names = state.scope.names.items()
    return {name: value for name, value in names if isinstance(value, Optimizer | Scaler)}


def _are_remade(before: dict[str, Value], state: State) -> bool:
    """Whether a name stands for another optimizer or scaler now: the next iteration steps that."""
    now = _step_makers(state)
    return any(now.get(name, value) is not value for name, value in before.items())


def _steps_in(state: State, node: ast.stmt, since: int) -> bool:
    """Whether part of a step happened in this loop itself."""
    return any(
        type(each) in STEP_EVENTS and each.context.loops and each.context.loops[-1].node is node
        for each in state.trace[since:]
    )


def _forget(state: State, node: ast.stmt, body: list[ast.stmt]) -> None:
    """Numbers that the loop changes are not known inside it."""
    for name in state.here.bound_in_loop(node, body):
        before = state.scope.get(name)
        if isinstance(before, Const) and isinstance(before.value, int | float | bool):
            changed = state.unknown(node, label=name)
            changed.op = "either"
            state.scope.set(name, changed)
    for target in state.here.counted_in_loop(node, body):
        owner = state.evaluate(target.value, quiet=True)
        held = owner.attributes.get(target.attr) if isinstance(owner, Instance) else None
        if isinstance(owner, Instance) and isinstance(held, Const):
            owner.attributes[target.attr] = state.unknown(node, label=dotted(target))


def _is_phases(over: Value | None) -> bool:
    """``for phase in ("train", "val")``: the second time round, other branches are taken."""
    if isinstance(over, DictValue):
        return len(over.items) == 2 and not over.open
    items = over.items if isinstance(over, ListValue) else []
    return len(items) == 2 and all(isinstance(e, Const) and isinstance(e.value, str) for e in items)


def _is_data(module: Module, node: ast.stmt, over: Value | None) -> bool:
    """Whether a loop runs over batches."""
    if isinstance(over, Loader) or (isinstance(over, Unknown) and over.op and is_loader(over)):
        return True
    if isinstance(node, ast.While):
        return False
    assert isinstance(node, ast.For | ast.AsyncFor)
    text = module.unparsed(node.iter)
    return (bool(LOADER.search(text)) and not text.startswith("range(")) or (
        "len(" in text and bool(LOADER.search(text))
    )


STATEMENTS: dict[type[ast.stmt], Callable[[State, Any], Flow | None]] = {
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
}
