"""What an expression stands for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from ampwise_lint.interpreter.attributes import attribute
from ampwise_lint.interpreter.items import element, entry, item, listed
from ampwise_lint.interpreter.naming import as_role
from ampwise_lint.interpreter.operators import binary, compare, negate
from ampwise_lint.path.conditions import decide, is_known, looked_up
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.roles import SCHEDULER, dotted
from ampwise_lint.torch_model import tensors
from ampwise_lint.torch_model.python_functions import CHOSEN_OF, class_chosen
from ampwise_lint.torch_model.tables import choices_in
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    DictValue,
    Function,
    Gradient,
    Imported,
    Instance,
    ListValue,
    Loader,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Partial,
    Ref,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    is_periodic,
    key_of,
    loop_of,
    truth,
)
from ampwise_lint.values.contents import ONE_BY_ONE, are_parts, loaders_in
from ampwise_lint.values.events import Read

BUILTINS = frozenset(dir(builtins))


def _constant(state: State, node: ast.Constant) -> Value:
    return NONE if node.value is None else Const(node.value)  # it is asked for by identity


def _name(state: State, node: ast.Name) -> Value:
    found = state.scope.get(node.id)
    if found is None:
        if node.id == "torch":  # brought in by a star import
            return Ref("torch")
        if node.id in BUILTINS:
            return Ref(f"builtins.{node.id}")
        found = Unknown(node.id, "given")
    if isinstance(found, Imported):
        found = state.resolve(found)
        state.scope.put(node.id, found)
    if isinstance(found, Const) and node.id in state.here.set_by_signals:
        return Unknown(node.id, "given")
    if isinstance(found, Function):
        state.named.add(id(found.node))
    return as_role(state, found, node.id)


def _attribute(state: State, node: ast.Attribute) -> Value:
    owner = state.evaluate(node.value)
    return attribute(state, node, owner, node.attr)


def _subscript(state: State, node: ast.Subscript) -> Value:
    owner = state.evaluate(node.value)
    index = state.evaluate(node.slice)
    if isinstance(index, Const):
        return item(state, owner, index.value, dotted(node), node)
    if isinstance(owner, Tensor):
        return entry(state, owner, index)
    if isinstance(owner, DictValue | ListValue):
        items = [*owner.items.values()] if isinstance(owner, DictValue) else owner.items
        kinds = {type(each) for each in items}
        if kinds == {Optimizer}:
            return _any_of([each for each in items if isinstance(each, Optimizer)])
        # nets[i] of known networks: any of them stands for all
        if len(kinds) == 1 and kinds <= {Optimizer, Scaler, Scheduler, Model, Instance, Loader}:
            return items[0]
        if items and all(map(_makes_optimizer, items)):
            return items[0]
    if isinstance(owner, DictValue) and (choices := choices_in(owner)):
        return looked_up(state, choices, index)
    if isinstance(owner, Ref) and (home := owner.path.removesuffix(".__dict__")) in CHOSEN_OF:
        return class_chosen(state, home, index)
    container = dotted(node.value)
    if isinstance(owner, DictValue) and SCHEDULER.search(container.rpartition(".")[2]):
        return Unknown(f"{container}[{key_of(index)}]", "given")
    return item(state, owner, key_of(index), dotted(node), node)


def _any_of(optimizers: list[Optimizer]) -> Optimizer:
    """``{"adam": Adam(...), "sgd": SGD(...)}[name]``: one of them."""
    first, *rest = optimizers
    known = {id(first), *map(id, first.others)}
    first.others = (*first.others, *(each for each in rest if id(each) not in known))
    return first


def _makes_optimizer(value: Value) -> bool:
    """A class of optimizers, also with some of its arguments, or a lambda that makes one."""
    match value:
        case Ref(path=path) | Partial(function=Ref(path=path)):
            return library.is_optimizer(path)
        case Function(node=ast.Lambda(body=ast.Call(func=made)), module=module):
            return library.is_optimizer(module.imports.full(made))
        case _:
            return False


def _sequence(state: State, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items: list[Value] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            value = state.evaluate(each.value)
            if isinstance(value, ListValue):
                items += value.items
            elif isinstance(value, Parameters):
                items.append(value)
            else:
                return state.unknown(node)
        else:
            items.append(state.evaluate(each))
    if len(items) == 1 and isinstance(items[0], Parameters):
        return items[0]  # [*model.parameters()]
    return listed(state, node, items)


def _dict(state: State, node: ast.Dict) -> Value:
    items: dict[Any, Value] = {}
    is_open = False
    for key, value_node in zip(node.keys, node.values, strict=True):
        value = state.evaluate(value_node)
        if key is None:
            if isinstance(value, DictValue):
                items |= value.items
                is_open |= value.open
            else:
                is_open = True
            continue
        where = state.evaluate(key)
        if isinstance(where, Const) and isinstance(where.value, str | bool | int):
            items[where.value] = value
        else:
            is_open = True
            items[key_of(where)] = value
    return DictValue(items, node, is_open)


def _conditional(state: State, node: ast.IfExp) -> Value:
    test = state.evaluate(node.test)
    branches = (node.body, node.orelse)
    match branches:
        case (ast.Constant(value=True), ast.Constant(value=False)) if isinstance(test, Unknown):
            return test  # it is what was asked
        case _:
            pass
    matters = any(id(each) in state.here.roles.steps for each in branches)
    plain = all(map(_is_plain, branches))
    if is_known(test) or matters or plain or isinstance(node.body, ast.Constant):
        taken = decide(state, test, not _is_unlikely(state, node.test))
        return _branch(state, node, test, taken=taken)
    other = _branch(state, node, test, taken=False)
    value = _branch(state, node, test, taken=True)
    return other if value is NONE or isinstance(value, Const) else value


def _branch(state: State, node: ast.IfExp, test: Value, *, taken: bool) -> Value:
    """One side of a conditional expression."""
    periodic, known = is_periodic([test]), is_known(test)
    with state.in_branch(node, test, taken=taken, periodic=periodic, known=known):
        return state.evaluate(node.body if taken else node.orelse)


def _is_plain(node: ast.expr) -> bool:
    """Whether it is a constant, a name in a module, a device, or a choice of such."""
    if isinstance(node, ast.IfExp):
        return _is_plain(node.body) and _is_plain(node.orelse)
    if isinstance(node, ast.Call):
        return dotted(node.func) in ("torch.device", "device")
    return isinstance(node, ast.Constant | ast.Attribute)


def _is_unlikely(state: State, node: ast.expr) -> bool:
    """Whether a condition is one that rarely holds, by its words."""
    text = state.here.unparsed(node).lower()
    return any(each in text for each in ("debug", "cpu", "no_cuda", "nan", "no_amp", "disable"))


def _boolean(state: State, node: ast.BoolOp) -> Value:
    operands: list[Value] = []
    value: Value = NONE
    is_and = isinstance(node.op, ast.And)
    for each in node.values:
        value = _operand(state, node, each, operands)
        known = truth(value) if is_known(value) else None
        if known is None:
            operands.append(value)
        elif known is not is_and:  # a false in an ``and``, a true in an ``or``, decides
            if not operands:
                return value
            operands.append(value)
            break
    if not operands:
        return value  # ``None or {}`` is the last of them
    if len(operands) == 1 or (not is_and and isinstance(operands[-1], Scaler | Optimizer)):
        return operands[-1]  # ``scaler or GradScaler()``: what is handed in is one, too
    op = "and" if is_and else "or"
    key = "(" + f" {op} ".join(map(key_of, operands)) + ")"
    return Unknown(
        key, op=op, operands=tuple(operands), periodic=is_periodic(operands), loop=loop_of(operands)
    )


def _operand(state: State, node: ast.BoolOp, operand: ast.expr, before: list[Value]) -> Value:
    """``step % 100 == 0 and loss.item() > 9``: once in a window what is behind is looked at."""
    if not isinstance(node.op, ast.And) or not is_periodic(before):
        return state.evaluate(operand)
    with state.in_branch(node, before[-1], taken=True, periodic=True, known=False):
        return state.evaluate(operand)


def _unary(state: State, node: ast.UnaryOp) -> Value:
    value = state.evaluate(node.operand)
    if isinstance(node.op, ast.Not):
        return negate(value)
    if isinstance(value, Const) and isinstance(node.op, ast.USub):
        try:
            return Const(-value.value)
        except TypeError:
            return state.unknown(node)
    return (
        value if isinstance(value, Tensor) else Unknown(f"-{key_of(value)}", loop=loop_of([value]))
    )


def _compare(state: State, node: ast.Compare) -> Value:
    left = state.evaluate(node.left)
    if len(node.ops) > 1:
        for each in node.comparators:
            state.evaluate(each)
        return state.unknown(node)
    right = state.evaluate(node.comparators[0])
    return compare(state, node, left, node.ops[0], right)


def _operator(state: State, node: ast.BinOp) -> Value:
    left = state.evaluate(node.left)
    right = state.evaluate(node.right)
    return binary(state, node, node.op, left, right)


def _lambda(state: State, node: ast.Lambda) -> Value:
    return Function(node, state.here, state.scope)


def _joined(state: State, node: ast.JoinedStr) -> Value:
    for each in node.values:
        if isinstance(each, ast.FormattedValue):
            value = state.evaluate(each.value)
            tensors.shown(state, each.value, value, "an f-string")
    return Unknown(f"str@{node.lineno}:{node.col_offset}")


def _comprehension(state: State, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
    if (parts := _for_each_part(state, node)) is not None:
        return parts
    value = _yielded(state, node, node.elt)
    match value:
        case Parameter():
            return Parameters(value.of, key_of(value.of))
        case Gradient() | Parameters() | Tensor():
            return value
        case _ if isinstance(value, LISTED):
            return ListValue([value], repeats=True)
        case ListValue(items=[first, *_]) if isinstance(first, LISTED):
            return ListValue([value], repeats=True)
        case _:
            return state.unknown(node)


def _for_each_part(
    state: State, node: ast.ListComp | ast.GeneratorExp | ast.SetComp
) -> Value | None:
    """``[each.state_dict() for each in (model, optimizer)]``: of parts that differ, all."""
    (generator, *others) = node.generators
    named = isinstance(generator.iter, ast.Name | ast.Attribute | ast.List | ast.Tuple)
    if others or generator.ifs or not named or not isinstance(node.elt, ast.Call):
        return None
    over = state.evaluate(generator.iter, quiet=True)
    if not isinstance(over, ListValue) or over.repeats:
        return None
    if not are_parts(over.items) or len(over.items) > ONE_BY_ONE:
        return None
    return ListValue([made for made, *_ in _for_each(state, node, over.items, node.elt)])


def _for_each(
    state: State, node: Comprehension, values: list[Value], *wanted: ast.expr
) -> Iterator[list[Value]]:
    """What a comprehension makes of each of the values that it runs over."""
    with _own_names(state):
        for each in values:
            state.assign(node.generators[0].target, each)
            yield [state.evaluate(part) for part in wanted]


@contextmanager
def _own_names(state: State) -> Generator[None]:
    """The names of a comprehension are its own."""
    names = dict(state.scope.names)
    try:
        yield
    finally:
        state.scope.names.clear()
        state.scope.names.update(names)


LISTED = Optimizer | Scheduler | Model | Instance | Scaler | Loader
"""What a comprehension lists, known by one of its kind."""

Comprehension = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp


def _yielded(state: State, node: Comprehension, wanted: ast.expr) -> Value:
    """What a comprehension makes of one element."""
    with _own_names(state):
        for generator in node.generators:
            over = state.evaluate(generator.iter)
            state.assign(generator.target, element(state, node, generator.target, over, False))
            for test in generator.ifs:
                state.evaluate(test, quiet=True)
        return state.evaluate(wanted)


def _dict_comprehension(state: State, node: ast.DictComp) -> Value:
    if known := _known_elements(state, node):
        made = _for_each(state, node, known, node.key, node.value)
        items = {k.value if isinstance(k, Const) else key_of(k): value for k, value in made}
        return DictValue(items, node)
    value = _yielded(state, node, node.value)
    return value if isinstance(value, Tensor) else DictValue({"": value}, node, open=True)


def _known_elements(state: State, node: ast.DictComp) -> list[Value]:
    """What it runs over, if that is written there or in sight.

    ``{name: getattr(self, name) for name in ("model", "optimizer")}``,
    ``{name: each.state_dict() for name, each in parts.items()}``.
    """
    (generator, *others) = node.generators
    if others:
        return []
    match generator.iter:
        case ast.Tuple(elts=names) | ast.List(elts=names) if isinstance(generator.target, ast.Name):
            known = all(isinstance(each, ast.Constant) for each in names)
            return [state.evaluate(each) for each in names] if known else []
        case ast.Call(func=ast.Attribute(value=owner, attr="items"), args=[]) if not generator.ifs:
            over = state.evaluate(owner, quiet=True)
            if not isinstance(over, DictValue) or over.open:
                return []
            pairs: list[Value] = [ListValue([Const(k), each]) for k, each in over.items.items()]
            return pairs if 1 < len(pairs) <= ONE_BY_ONE else []
        case _:
            return []


def _named(state: State, node: ast.NamedExpr) -> Value:
    value = state.evaluate(node.value)
    state.assign(node.target, value)
    return value


def _starred(state: State, node: ast.Starred) -> Value:
    return state.evaluate(node.value)


def _await(state: State, node: ast.Await) -> Value:
    return state.evaluate(node.value)


def _yield(state: State, node: ast.Yield | ast.YieldFrom) -> Value:
    if node.value is not None:
        for loader in loaders_in(state.evaluate(node.value)):
            state.emit(Read, node, loader, "yield")
    return state.unknown(node)


def _slice(state: State, node: ast.Slice) -> Value:
    return Unknown(f"slice@{node.lineno}:{node.col_offset}")


EXPRESSIONS: dict[type[ast.expr], Callable[[State, Any], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Set: _sequence,
    ast.Dict: _dict,
    ast.IfExp: _conditional,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BinOp: _operator,
    ast.Lambda: _lambda,
    ast.JoinedStr: _joined,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.SetComp: _comprehension,
    ast.DictComp: _dict_comprehension,
    ast.NamedExpr: _named,
    ast.Starred: _starred,
    ast.Await: _await,
    ast.Yield: _yield,
    ast.YieldFrom: _yield,
    ast.Slice: _slice,
}
