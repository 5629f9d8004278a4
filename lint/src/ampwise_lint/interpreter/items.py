"""What a container holds, and what a loop over it yields."""

from __future__ import annotations

import ast
import re
from typing import Any

from ampwise_lint.interpreter.naming import as_role, named, part_of
from ampwise_lint.path.state import State
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import is_inside, scope_of
from ampwise_lint.source.roles import dotted
from ampwise_lint.torch_model import tensors, trainers
from ampwise_lint.torch_model.python_functions import is_loader
from ampwise_lint.values.abstract import (
    MOST,
    Const,
    DictValue,
    Gradient,
    ListValue,
    Loader,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.contents import modules_in
from ampwise_lint.values.events import GradientRead, Op, Report

ENTRY = "entry of "


def entry(state: State, owner: Tensor, index: Value) -> Tensor:
    """``losses[name]`` in a loop over the names: the entry that was divided is among them."""
    is_any = isinstance(index, Unknown) and index.key.startswith(f"key of {owner.key}#")
    divided = _divided_entry(state, owner) if is_any else None
    return divided or owner.but(op="index", inputs=(owner,))


def _divided_entry(state: State, owner: Tensor) -> Tensor | None:
    """The entry of a mapping of losses that was divided, if one was."""
    known = [v for k, v in state.converted.items() if k.startswith(f"{ENTRY}{owner.key}[")]
    return next((each for each in known if isinstance(each, Tensor) and each.divided), None)


def item(state: State, owner: Value, index: Any, text: str, node: Node | None = None) -> Value:
    """``owner[index]``."""
    match owner:
        case DictValue(items=items) if index in items:
            return items[index]
        case DictValue(items=items) if isinstance(index, str):
            return as_role(state, Unknown(f"{{...}}[{index!r}]", "given"), text)
        case ListValue(items=items) if isinstance(index, int) and -len(items) <= index < len(items):
            return items[index]
        case Parameters():
            return owner
        case Tensor() if owner.data or owner.forward:
            return part_of(owner, index)
        case Tensor() if isinstance(index, str):  # no tensor, but a mapping of some: each is one
            part = owner.but(op="index", inputs=(owner,))
            return state.converted.setdefault(f"{ENTRY}{owner.key}[{index}]", part)
        case Tensor():
            return owner.but(op="index", inputs=(owner,))
        case Model() if modules := modules_in(owner):
            inside = isinstance(index, int) and -len(modules) <= index < len(modules)
            return modules[index if inside else 0]
        case Model():
            return as_role(state, Unknown(f"{owner.key}[{index!r}]", "given"), text)
        case Unknown():
            made = owner.made if owner.made != "computed" else "called"
            key = f"{owner.key}[{index!r}]"
            return as_role(state, Unknown(key, made, loop=owner.loop, of=owner.of), text)
        case Wrapper(path=path):
            return as_role(state, Unknown(f"{path}[{index!r}]", "called"), text)
        case _:
            return Unknown(f"{key_of(owner)}[{index!r}]")


def set_item(
    state: State, target: ast.Subscript, owner_node: ast.expr, index: ast.expr, value: Value
) -> None:
    """``owner[index] = value``."""
    owner = state.evaluate(owner_node, quiet=True)
    where = state.evaluate(index, quiet=True)
    if isinstance(owner, DictValue) and isinstance(where, Const) and isinstance(where.value, str):
        # What stood there before, a branch that may not be taken leaves there.
        if not (state.unsure and owner.open and isinstance(value, Const)):
            owner.items[where.value] = named(value, where.value)
    elif isinstance(owner, ListValue) and isinstance(value, Tensor):
        _set_in_list(owner, where, value)
    elif isinstance(owner, Gradient):
        state.emit(GradientRead, target, True)
    elif isinstance(owner, Tensor):
        state.emit(Op, target, "setitem", (owner, where, value), {}, owner)
        if isinstance(where, Const) and isinstance(where.value, str):
            state.converted[f"{ENTRY}{owner.key}[{where.value}]"] = value
    elif _is_figure(state, owner_node, value):
        statement = state.here.statement_of(target)
        if isinstance(statement, ast.Assign):
            given = statement.value
            state.emit(Report, given, value, "", tensors.is_rescaled(given))
    elif isinstance(owner, Unknown) and isinstance(where, Const):
        state.converted[f"item {owner.key}[{where.value!r}]"] = value
    elif isinstance(owner, DictValue) and _is_state(value):
        owner.items[key_of(where)] = value
    elif isinstance(owner, DictValue):
        owner.open = True


def _set_in_list(owner: ListValue, where: Value, value: Tensor) -> None:
    """``x[i] = layer(x[i])``; by an index that is not known all are set, in turn."""
    number = where.value if isinstance(where, Const) else None
    if isinstance(number, int) and -len(owner.items) <= number < len(owner.items):
        owner.items[number] = value
    elif number is None and all(isinstance(each, Tensor) for each in owner.items):
        owner.items = [value for _ in owner.items]


FIGURES = re.compile(r"\.(loc|iloc|at|iat)$|hist(ory)?\b|(^|_)(metrics|stats|logs?|records?)\b")
"""Tables of figures, by their names and how they are written to."""


def _is_figure(state: State, table: ast.expr, value: Value) -> bool:
    is_number = isinstance(value, Tensor) and value.host
    return is_number and bool(FIGURES.search(state.here.unparsed(table)))


def _is_state(value: Value) -> bool:
    """Whether it is the state of something in sight: a checkpoint holds that, by whatever key."""
    return isinstance(value, Parameters) and isinstance(value.of, Optimizer | Scheduler | Model)


def listed(state: State, node: Node, items: list[Value]) -> Value:
    """A list; of too many values nothing is known."""
    made = ListValue(items)
    return made if made.size <= MOST else state.unknown(node)


def element(
    state: State, node: Node, target: ast.expr, over: Value | None, over_data: bool
) -> Value:
    """What a loop's target stands for in one iteration."""
    where = f"{key_of(over)}#{state.iteration}"
    match over:
        case Parameters(of=owner):
            parameter = Parameter(owner)
            if isinstance(target, ast.Tuple) and len(target.elts) == 2:
                return ListValue([Unknown(f"name of {where}"), parameter])
            # ``for group in optimizer.param_groups`` yields groups, whose items lead on here
            return over if over.key.endswith("param_groups") else parameter
        case ListValue(items=items) if items:
            return items[min(state.micro_batch, len(items) - 1)]
        case Loader():
            return Tensor(key=f"batch {where}", data=True)
        case Model() if modules := modules_in(over):
            return modules[min(state.micro_batch, len(modules) - 1)]
        case Tensor(op="items") if isinstance(target, ast.Tuple) and (
            divided := _divided_entry(state, over)
        ):
            return ListValue([Unknown(f"key of {where}", loop=state.iteration), divided])
        case Tensor() if _is_key(state, node, target):
            return Unknown(f"key of {where}", loop=state.iteration)
        case Tensor() | Gradient():
            return over
        case Unknown(op="enumerate" | "zip" | "tqdm", operands=operands):
            return _enumerated(state, node, target, over, operands, where)
        case Unknown(op=op) if over_data and op != "range":  # ``range(len(loader))``: no batches
            return Tensor(key=f"batch {where}", data=True, moved=trainers.puts_on_device(over))
        case Unknown(op="items", operands=(DictValue(items=known), *_)) if known:
            name = _nth(state, known)
            return ListValue([Const(name), known[name]])
        case DictValue(items=known, open=False) if known:
            return Const(_nth(state, known))
        case _:
            return Unknown(f"{dotted(target) or 'item'} of {where}", loop=state.iteration)


def _is_key(state: State, node: Node, target: ast.expr) -> bool:
    """Whether a loop takes its target for a key: ``for name in losses: losses[name]``.

    Also where the function takes what the loop is over for a mapping: ``losses["total"]``.
    """
    name = dotted(target)
    if isinstance(node, ast.For | ast.AsyncFor):
        over = state.here.unparsed(node.iter)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        over = state.here.unparsed(node.generators[0].iter)
    else:
        return False
    over = over.removesuffix(".keys()")
    if not name:
        return False
    return f"{over}[{name}]" in state.here.unparsed(node) or _is_mapping(state, node, over)


def _is_mapping(state: State, node: Node, name: str) -> bool:
    """Whether the function around a loop takes something by a text: ``losses["total"]``."""
    scope = scope_of(state.here, node)
    return any(
        isinstance(each.slice, ast.Constant)
        and isinstance(each.slice.value, str)
        and dotted(each.value) == name
        and is_inside(state.here, each, scope)
        for each in state.here.index.of(ast.Subscript)
    )


def _nth(state: State, items: dict[Any, Value]) -> Any:
    """The key of a dict that a loop over it comes to."""
    return list(items)[min(state.micro_batch, len(items) - 1)]


def _enumerated(
    state: State,
    node: Node,
    target: ast.expr,
    over: Unknown,
    operands: tuple[Value, ...],
    where: str,
) -> Value:
    data = is_loader(over)
    if over.op == "tqdm":
        return element(state, node, target, operands[0], data)
    if over.op == "enumerate":
        index = Unknown(f"index of {where}", loop=state.iteration)
        inner_target = (
            target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) > 1 else target
        )
        return ListValue([index, element(state, node, inner_target, operands[0], data)])
    targets = target.elts if isinstance(target, ast.Tuple) else [target] * len(operands)
    return ListValue(
        [
            element(state, node, each, operand, is_loader(operand))
            for each, operand in zip(targets, operands, strict=False)
        ]
    )
