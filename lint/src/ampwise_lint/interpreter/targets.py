"""Assignment: what names, attributes and items are bound to."""

from __future__ import annotations

import ast
from dataclasses import replace

from ampwise_lint.interpreter.items import item, set_item
from ampwise_lint.interpreter.naming import named
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import dotted
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    NONE,
    Class,
    Const,
    DictValue,
    Gradient,
    Instance,
    ListValue,
    Loader,
    Model,
    Optimizer,
    Parameter,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    truth,
)
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import modules_in
from ampwise_lint.values.events import CastDown, CastUp, GradientRead, ZeroGrad


def assign(state: State, target: ast.expr, value: Value) -> None:
    """Assign to a target."""
    match target:
        case ast.Name(id=name):
            before = state.scope.get(name)
            value = _kept(state, target, before, value)
            if not (state.unsure and _is_lost(before, value)):
                state.scope.set(name, named(value, name))
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            for each, part in zip(targets, _parts(state, value, targets), strict=True):
                assign(state, each, part)
        case ast.Starred(value=inner):
            assign(state, inner, value)
        case ast.Attribute(value=owner, attr=attr):
            _set_attribute(state, target, state.evaluate(owner), attr, value)
        case ast.Subscript(value=ast.Call(func=ast.Name(id="globals")), slice=index):
            if not isinstance(index, ast.Constant):
                forget_constants(state, target)
        case ast.Subscript(value=owner, slice=index):
            set_item(state, target, owner, index, value)
        case _:
            pass


def _either(
    state: State, target: ast.Name | ast.Attribute, before: Value | None, value: Value
) -> Value:
    """What is bound in a branch that may not be taken: of optimizers both, of constants one.

    Of a dict that is empty without it: when it holds something.
    """
    if not state.unsure:
        return value
    if isinstance(before, DictValue) and truth(before) is False and isinstance(value, DictValue):
        return replace(value, periodic=state.context.is_periodic)
    if isinstance(before, Optimizer) and isinstance(value, Optimizer):
        value.others = (*before.others, before)
    if isinstance(before, Optimizer) and isinstance(value, Unknown) and value.made == "called":
        return before  # of a library that was not given: the one that is known says more
    if isinstance(before, Const) and isinstance(value, Const) and before.value != value.value:
        either = state.unknown(target, label=dotted(target))
        either.op = "either"
        either.periodic = state.context.is_periodic
        return either
    if isinstance(before, Unknown) and before.op == "either" and isinstance(value, Const):
        return before
    return value


def _parts(state: State, value: Value, targets: list[ast.expr]) -> list[Value]:
    parts = _unpacked(state, value, targets)
    is_packed = isinstance(value, Tensor | Unknown) and len(targets) > 1
    if is_packed and dotted(targets[1]) == library.PACKED_SIZES:  # of a PackedSequence
        parts[1] = tensors.packed_sizes(value)
    return parts


def _unpacked(state: State, value: Value, targets: list[ast.expr]) -> list[Value]:
    starred = any(isinstance(each, ast.Starred) for each in targets)
    match value:
        case ListValue(items=items) if len(items) == len(targets) and not starred:
            return list(items)
        case ListValue(items=[Optimizer() as one], repeats=True):
            return [replace(one, key=f"{one.key}[{number}]") for number in range(len(targets))]
        case ListValue(items=[one], repeats=True):
            return [one] * len(targets)
        case Model() if len(modules := modules_in(value)) == len(targets) and not starred:
            return modules
        case ListValue() if not starred:  # Python raises: nothing of it is known
            return [state.unknown(each, "called", dotted(each)) for each in targets]
        case Tensor():
            return [value.but(key=f"{value.key}[{i}]") for i in range(len(targets))]
        case _:
            return [
                item(state, value, number, dotted(each) or str(number))
                for number, each in enumerate(targets)
            ]


def _set_attribute(
    state: State, node: ast.Attribute, owner: Value, attr: str, value: Value
) -> None:
    if attr == "grad" and isinstance(owner, Instance) and not is_network(owner.class_):
        if not isinstance(value, Gradient):  # ``config.grad`` is a setting, too
            owner.attributes[attr] = value
    elif attr == "grad":
        if value is NONE or (isinstance(value, Const) and value.value is None):
            state.emit(ZeroGrad, node, owner)
        else:
            divisor = value.divisor if isinstance(value, Gradient) else None
            state.emit(GradientRead, node, True, divisor, value, is_linear=divisor is not None)
    elif isinstance(owner, Gradient) and attr == "data":
        if isinstance(value, Gradient) and value.divisor is not None:
            state.emit(GradientRead, node, True, value.divisor, is_linear=True)
    elif isinstance(owner, Parameter) and attr == "data" and isinstance(value, Tensor):
        if value.cast is not None and is_low(value.dtype):
            state.emit(CastDown, value.cast.node, owner.of, value.cast.dtype)
        elif value.dtype == "float32" and value.of is owner:
            state.emit(CastUp, node, owner.of)
    elif isinstance(owner, Instance):
        before = owner.attributes.get(attr)
        owner.attributes[attr] = named(_kept(state, node, before, value), attr)
    elif isinstance(owner, Class):
        owner.attributes[attr] = value
    elif isinstance(owner, DictValue) and owner.is_object:
        owner.items[attr] = named(_kept(state, node, owner.items.get(attr), value), attr)
    elif isinstance(owner, Tensor) and (owner.data or owner.forward):
        state.converted[f"attribute {owner.key}.{attr}"] = value
    elif isinstance(owner, Unknown):
        key = f"{owner.key}.{attr}"
        before = state.converted.get(f"attribute {key}", Unknown(key, "given", of=owner))
        state.converted[f"attribute {key}"] = named(_kept(state, node, before, value), attr)


def _kept(
    state: State, node: ast.Name | ast.Attribute, before: Value | None, value: Value
) -> Value:
    """What a name or attribute holds: of a setting and a branch's constant, either may stand."""
    if state.unsure and isinstance(before, Unknown) and isinstance(value, Const):
        return before
    return _either(state, node, before, value)


def _is_lost(before: Value | None, value: Value) -> bool:
    """Whether something made in sight would be replaced by nothing that is known."""
    nothing = isinstance(value, Unknown) or (
        isinstance(value, Const) and isinstance(value.value, str | None)
    )
    return nothing and isinstance(
        before, Optimizer | Scaler | Model | Instance | Scheduler | Loader | Wrapper
    )


def forget_constants(state: State, node: Node) -> None:
    """Settings at the top of a file that other code may have set anew are not known."""
    names = state.scope.top.names
    for name, value in names.items():
        if isinstance(value, Const) and not name.startswith("_"):
            names[name] = state.unknown(node, label=name)
