"""What an expression stands for."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable
from typing import Any

from ampwise_lint.interpreter.naming import as_role, named
from ampwise_lint.path.conditions import decide, is_known
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOSS, dotted
from ampwise_lint.torch_model import functions, tensors
from ampwise_lint.values.abstract import (
    FALSE,
    MOST,
    NONE,
    TRUE,
    Bound,
    Class,
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
    Ref,
    Scaler,
    Scheduler,
    Super,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_periodic,
    key_of,
    loop_of,
    truth,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_autograd_function, is_network
from ampwise_lint.values.events import Elapsed, Op

BUILTINS = frozenset(dir(builtins))
NETWORK_METHODS = {
    "parameters", "named_parameters", "train", "eval", "half", "bfloat16", "float", "to", "cuda",
    "cpu", "zero_grad", "state_dict", "load_state_dict", "requires_grad_", "apply", "double",
    "type", "clip_grad_norm_", "modules", "named_modules", "children", "named_children", "buffers",
    "named_buffers",
}  # fmt: skip


def _constant(state: State, node: ast.Constant) -> Value:
    return Const(node.value)


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
    return as_role(state, found, node.id)


def _attribute(state: State, node: ast.Attribute) -> Value:
    owner = state.evaluate(node.value)
    return attribute(state, node, owner, node.attr)


def attribute(state: State, node: Node, owner: Value, attr: str) -> Value:
    """An attribute of a value."""
    if isinstance(owner, Ref):  # torch.nn.functional.relu: most of all
        return Ref(library.canonical(f"{owner.path}.{attr}"))
    text = dotted(node)
    match owner:
        case Instance():
            return _of_instance(state, node, owner, attr)
        case Class():
            return _of_class(node, owner, attr)
        case DictValue(items=items) if attr in items:
            value = items[attr]
            if isinstance(value, Imported):
                value = items[attr] = state.resolve(value)
            return as_role(state, value, text)
        case Const(value=str(device)) if attr == "type":
            return Const(device.partition(":")[0])
        case _ if attr == "grad" and isinstance(owner, Parameter | Unknown | Tensor | Model):
            return Gradient(owner)
        case Gradient() if attr == "data":
            return owner
        case Tensor() if attr in ("data", "T", "mT", "H"):
            return owner
        case Tensor() if attr in ("shape", "ndim", "device", "dtype", "is_cuda", "requires_grad"):
            return Unknown(f"{key_of(owner)}.{attr}", of=owner)
        case Tensor(key=key, data=True) if f"attribute {key}.{attr}" in state.converted:
            return state.converted[f"attribute {key}.{attr}"]
        case Tensor() if (owner.forward or owner.data) and id(node) not in state.called:
            # ``output.logits``, ``output.loss``, ``batch.x``: a part of it
            return owner.but(loss=True) if LOSS.search(attr) else owner
        case Parameter() if attr == "data":
            return owner
        case Optimizer() if attr == "param_groups":
            return Parameters(owner, f"{owner.key}.param_groups")
        case Model(inner=inner) if attr == "module" and inner is not None:
            return inner
        case Model(key=key) if id(node) not in state.called and attr not in NETWORK_METHODS:
            return as_role(state, Unknown(f"{key}.{attr}", "given", of=owner), text)
        case Scaler() if attr in ("_scale", "_enabled"):
            return Unknown(f"{owner.key}.{attr}", scale=True)
        case Unknown():
            return _of_unknown(state, owner, attr, text)
        case Super():
            return _of_bases(owner, attr, node)
        case _:
            return Bound(owner, attr, node)


def _of_instance(state: State, node: Node, owner: Instance, attr: str) -> Value:
    text = dotted(node)
    class_, attributes = owner.class_, owner.attributes
    if attr in attributes and not _is_placeholder(state, class_, attributes[attr], attr, text):
        return as_role(state, attributes[attr], text)
    if found := class_.lookup(attr):
        return _inherited(state, node, owner, found[0], text)
    if attr in NETWORK_METHODS and is_network(class_):
        return Bound(owner, attr, node)
    return as_role(state, Unknown(f"self.{attr}", "given", of=owner), text)


ENUMS = ("Enum", "IntEnum", "StrEnum", "Flag")
SETTINGS = re.compile(r"(config|cfg|options?|args|arguments|settings|hparams)$", re.IGNORECASE)
"""Classes of settings: what they are set to is what they are until somebody wants another."""


def _is_placeholder(state: State, class_: Class, value: Value, attr: str, text: str) -> bool:
    """Whether an attribute is set to something else later: here, in a class derived, by a user."""
    if not isinstance(value, Const):
        return False
    if isinstance(value.value, bool | str) and SETTINGS.search(class_.node.name):
        return True
    used = value.value is None and bool(state.here.roles.methods.get(text))
    assigned = class_.module.assigned_in(class_.node)
    return (used and attr not in assigned.chosen) or attr in assigned.later


def _of_class(node: Node, owner: Class, attr: str) -> Value:
    if attr in owner.attributes and any(e.endswith(ENUMS) for e in owner.ancestors()[1:]):
        return Ref(f"{owner.node.name}.{attr}")  # a member is itself, and none of the others
    if found := owner.lookup(attr):
        return found[0]
    if attr == "apply" and is_autograd_function(owner):
        return Bound(owner, attr, node)
    return Unknown(f"{owner.node.name}.{attr}", "given")


def _of_unknown(state: State, owner: Unknown, attr: str, text: str) -> Value:
    key = f"{owner.key}.{attr}"
    stored = state.converted.get(f"attribute {key}")
    if stored is not None:
        return stored
    made = "called" if owner.made == "called" else "given"
    found = Unknown(key, made, periodic=owner.periodic, loop=owner.loop, of=owner)
    return as_role(state, found, text)


def _of_bases(owner: Super, attr: str, node: Node) -> Value:
    for base in owner.class_.bases:
        if isinstance(base, Class) and (found := base.lookup(attr)) is not None:
            value = found[0]
            if isinstance(value, Function):
                return Function(value.node, value.module, value.scope, owner.owner, value.class_)
            return value
    return Bound(owner, attr, node)


def _inherited(state: State, node: Node, owner: Instance, found: Value, text: str) -> Value:
    """What an object's class holds under a name: a method is bound, a property is walked."""
    if not isinstance(found, Function):
        return as_role(state, found, text)
    function = found.node
    names = {dotted(each).rpartition(".")[2] for each in getattr(function, "decorator_list", [])}
    bound = Function(function, found.module, found.scope, owner, found.class_)
    if names & {"property", "cached_property"}:
        return state.call(bound, Arguments(), node)
    if "staticmethod" in names:
        return found
    return bound


def _subscript(state: State, node: ast.Subscript) -> Value:
    owner = state.evaluate(node.value)
    index = state.evaluate(node.slice)
    if isinstance(index, Const):
        return item(state, owner, index.value, dotted(node), node)
    if isinstance(owner, Tensor):
        return owner.but(op="index", inputs=(owner,))
    if isinstance(owner, DictValue | ListValue):
        items = owner.items.values() if isinstance(owner, DictValue) else owner.items
        kinds = {type(each) for each in items}
        # nets[i] of known networks: any of them stands for all
        if len(kinds) == 1 and kinds <= {Optimizer, Scaler, Model, Instance, Loader}:
            return next(iter(items))
        if items and all(isinstance(e, Ref) and library.is_optimizer(e.path) for e in items):
            return next(iter(items))
    return item(state, owner, key_of(index), dotted(node), node)


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
        case Tensor():
            return owner if owner.data or owner.forward else owner.but(op="index", inputs=(owner,))
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
        owner.items[where.value] = named(value, where.value)
    elif isinstance(owner, Tensor):
        state.emit(Op, target, "setitem", (owner, where, value), {}, owner)
    elif isinstance(owner, DictValue):
        owner.open = True


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
    return _listed(state, node, items)


def _listed(state: State, node: Node, items: list[Value]) -> Value:
    """A list; of too many values nothing is known."""
    made = ListValue(items)
    return made if made.size <= MOST else state.unknown(node)


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
    matters = any(id(each) in state.here.roles.steps for each in branches)
    plain = all(isinstance(each, ast.Constant | ast.Attribute) for each in branches)
    if is_known(test) or matters or plain or isinstance(node.body, ast.Constant):
        taken = decide(state, test, not _is_unlikely(state, node.test))
        return state.evaluate(node.body if taken else node.orelse)
    other = state.evaluate(node.orelse)
    value = state.evaluate(node.body)
    return other if value is NONE or isinstance(value, Const) else value


def _is_unlikely(state: State, node: ast.expr) -> bool:
    """Whether a condition is one that rarely holds, by its words."""
    text = state.here.unparsed(node).lower()
    return any(each in text for each in ("debug", "cpu", "no_cuda", "nan", "no_amp", "disable"))


def _boolean(state: State, node: ast.BoolOp) -> Value:
    operands: list[Value] = []
    is_and = isinstance(node.op, ast.And)
    for each in node.values:
        value = state.evaluate(each)
        known = truth(value) if is_known(value) else None
        if known is None:
            operands.append(value)
        elif known is not is_and:  # a false in an ``and``, a true in an ``or``, decides
            if not operands:
                return value
            operands.append(value)
            break
    if not operands:
        return TRUE if is_and else FALSE
    if len(operands) == 1:
        return operands[0]
    op = "and" if is_and else "or"
    key = "(" + f" {op} ".join(map(key_of, operands)) + ")"
    return Unknown(
        key, op=op, operands=tuple(operands), periodic=is_periodic(operands), loop=loop_of(operands)
    )


def negate(value: Value) -> Value:
    """``not value``."""
    known = truth(value)
    if isinstance(value, Unknown) and value.op == "not":
        return value.operands[0]
    if known is not None and not isinstance(value, Scaler | Optimizer | Scheduler | Model):
        return FALSE if known else TRUE
    return Unknown(
        f"not {key_of(value)}",
        op="not",
        operands=(value,),
        periodic=is_periodic([value]),
        loop=loop_of([value]),
    )


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


def compare(state: State, node: Node, left: Value, op: ast.cmpop, right: Value) -> Value:
    """A comparison: a constant where both sides are, else a condition with a key."""
    if isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn):
        positive = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}[type(op)]
        return negate(compare(state, node, left, positive(), right))
    if isinstance(op, ast.Eq | ast.Is):
        equal = _equality(state, node, left, right)
        if equal is not None:
            return equal
    if isinstance(left, Const) and isinstance(right, Const | ListValue):
        known = _known_comparison(left, op, right)
        if known is not None:
            return TRUE if known else FALSE
    if any(isinstance(each, Tensor) and not each.host for each in (left, right)):
        return tensors.apply(state, node, "eq", (left, right))
    periodic = is_periodic([left, right]) or _is_boundary(left, right) or _waits(left, right)
    name = type(op).__name__
    return Unknown(
        f"({key_of(left)} {name} {key_of(right)})",
        op=name,
        operands=(left, right),
        periodic=periodic,
        loop=loop_of([left, right]),
    )


def _equality(state: State, node: Node, left: Value, right: Value) -> Value | None:
    """``x is None``, ``x == True``, ``dtype == torch.float16``; None for any other comparison."""
    match left, right:
        case Const(), Const(value=None):
            return TRUE if left.value is None else FALSE
        case Gradient(), Const(value=None):
            return state.unknown(node)
        case _, Const(value=None):
            return negate(left)
        case Unknown(), Const(value=bool(expected)):
            return left if expected else negate(left)
        case Ref(path=one), Ref(path=other):
            same = library.DTYPES.get(one, one) == library.DTYPES.get(other, other)
            return TRUE if same else FALSE
        case _:
            return None


def _waits(*values: Value) -> bool:
    """Whether a comparison asks how much time has gone by."""
    return any(
        isinstance(each, Unknown)
        and (each.clock is not None or (each.op == "sub" and _waits(*each.operands)))
        for each in values
    )


def _is_boundary(left: Value, right: Value) -> bool:
    """Whether a comparison asks for the last of some micro-batches."""
    keys = key_of(left), key_of(right)
    counts = ("accum", "update_freq", "iter_size", "grad_step")
    if any(each in key for each in counts for key in keys):
        return any("#" in key or "index of" in key for key in keys)
    return any("index of" in key for key in keys) and any("len(" in key for key in keys)


def _known_comparison(left: Const, op: ast.cmpop, right: Const | ListValue) -> bool | None:
    if isinstance(right, ListValue):
        if not isinstance(op, ast.In) or not all(isinstance(e, Const) for e in right.items):
            return None
        return any(e.value == left.value for e in right.items if isinstance(e, Const))
    compared: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
        ast.Eq: lambda a, b: a == b,
        ast.Is: lambda a, b: a == b,
        ast.Lt: lambda a, b: a < b,
        ast.LtE: lambda a, b: a <= b,
        ast.Gt: lambda a, b: a > b,
        ast.GtE: lambda a, b: a >= b,
        ast.In: lambda a, b: a in b,
    }
    try:
        return bool(compared[type(op)](left.value, right.value))
    except TypeError:
        return None


def _operator(state: State, node: ast.BinOp) -> Value:
    left = state.evaluate(node.left)
    right = state.evaluate(node.right)
    return binary(state, node, node.op, left, right)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Pow: lambda a, b: a**b if abs(b) < 200 and abs(a) < 1e6 else None,
    ast.Mod: lambda a, b: a % b,
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
    ast.MatMult: "matmul", ast.Mod: "%", ast.FloorDiv: "floordiv",
}  # fmt: skip


def binary(state: State, node: Node, op: ast.operator, left: Value, right: Value) -> Value:
    """An operator."""
    name = OPERATORS.get(type(op), "?")
    if isinstance(left, Const) and isinstance(left.value, str) and name == "%":
        return _formatted(state, node, right)
    if isinstance(left, Const) and isinstance(right, Const):
        return _constants(state, node, op, left, right)
    if name == "%" and isinstance(right, Const) and right.value == 1:
        return Const(0)
    if isinstance(left, Gradient) or isinstance(right, Gradient):
        return _of_gradient(node, name, left, right)
    if isinstance(left, ListValue) and isinstance(right, ListValue) and name == "add":
        return _listed(state, node, [*left.items, *right.items])
    if isinstance(left, Parameters) and name == "add":
        return _listed(state, node, [left, right])
    counts = name == "%" and isinstance(left, Tensor) and left.host
    if not counts and (isinstance(left, Tensor) or isinstance(right, Tensor)):
        return tensors.arithmetic(state, node, name, left, right)
    if isinstance(left, ListValue) and name == "mul":
        return left
    both = [left, right]
    if name == "sub":
        _note_duration(state, node, left, right)
    return Unknown(
        f"({key_of(left)} {name} {key_of(right)})",
        op=name,
        operands=(left, right),
        periodic=name == "%" or is_periodic(both),
        loop=loop_of(both),
        scale=any(isinstance(each, Unknown) and each.scale for each in both),
    )


def _of_gradient(node: Node, name: str, left: Value, right: Value) -> Value:
    """``p.grad / scale``; a factor that clips is none that undoes a scale."""
    gradient, other = (left, right) if isinstance(left, Gradient) else (right, left)
    scales = name in ("mul", "div") and "clip" not in ast.unparse(node).lower()
    return Gradient(gradient.of, other) if scales and isinstance(gradient, Gradient) else gradient


def _note_duration(state: State, node: Node, left: Value, right: Value) -> None:
    """``time.time() - start``."""
    end = left.clock if isinstance(left, Unknown) else None
    begin = right.clock if isinstance(right, Unknown) else None
    # A time that a file read when it was imported is of no path.
    if begin is not None and end is not None and 0 < begin <= end <= len(state.trace):
        state.emit(Elapsed, node, begin, end)


def _formatted(state: State, node: Node, right: Value) -> Value:
    """``"loss %f" % loss``."""
    operand = node.right if isinstance(node, ast.BinOp) else None
    if operand is not None:
        nodes = operand.elts if isinstance(operand, ast.Tuple) else [operand]
        values = right.items if isinstance(right, ListValue) else [right]
        for each, value in zip(nodes, values, strict=False):
            tensors.shown(state, each, value)
    return Unknown(f"str@{node.lineno}:{node.col_offset}")


def _constants(state: State, node: Node, op: ast.operator, left: Const, right: Const) -> Value:
    compute = _ARITHMETIC.get(type(op))
    both = (left.value, right.value)
    repeats = isinstance(op, ast.Mult) and any(isinstance(each, str | bytes) for each in both)
    if compute is None or repeats or not all(map(_is_small, both)):
        return state.unknown(node)
    try:
        return Const(compute(*both))
    except (TypeError, ValueError, ArithmeticError):
        return state.unknown(node)


def _is_small(value: object) -> bool:
    """Whether a constant may be computed with: no code that is only read fills the memory."""
    if isinstance(value, str | bytes):
        return len(value) < 1000
    return not isinstance(value, int) or abs(value) <= 1 << 40


def _lambda(state: State, node: ast.Lambda) -> Value:
    return Function(node, state.here, state.scope)


def _joined(state: State, node: ast.JoinedStr) -> Value:
    for each in node.values:
        if isinstance(each, ast.FormattedValue):
            value = state.evaluate(each.value)
            tensors.shown(state, each.value, value)
    return Unknown(f"str@{node.lineno}:{node.col_offset}")


def _comprehension(state: State, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
    value = _yielded(state, node, node.elt)
    match value:
        case Parameter():
            return Parameters(value.of, key_of(value.of))
        case Gradient() | Parameters() | Tensor():
            return value
        case Optimizer() | Model() | Instance() | Scaler() | Loader():
            return ListValue([value])
        case _:
            return state.unknown(node)


Comprehension = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp


def _yielded(state: State, node: Comprehension, wanted: ast.expr) -> Value:
    """What a comprehension makes of one element; its names are its own."""
    names = dict(state.scope.names)
    try:
        for generator in node.generators:
            over = state.evaluate(generator.iter)
            state.assign(generator.target, element(state, node, generator.target, over, False))
            for test in generator.ifs:
                state.evaluate(test, quiet=True)
        return state.evaluate(wanted)
    finally:
        state.scope.names.clear()
        state.scope.names.update(names)


def _dict_comprehension(state: State, node: ast.DictComp) -> Value:
    value = _yielded(state, node, node.value)
    return value if isinstance(value, Tensor) else DictValue({"": value}, node, open=True)


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
        case Tensor():
            return over
        case Unknown(op="enumerate" | "zip" | "tqdm", operands=operands):
            return _enumerated(state, node, target, over, operands, where)
        case Unknown() if over_data:
            return Tensor(key=f"batch {where}", data=True)
        case Unknown(op="items", operands=(DictValue(items=known), *_)) if known:
            return ListValue([Const(next(iter(known))), next(iter(known.values()))])
        case _:
            return Unknown(f"{dotted(target) or 'item'} of {where}", loop=state.iteration)


def _enumerated(
    state: State,
    node: Node,
    target: ast.expr,
    over: Unknown,
    operands: tuple[Value, ...],
    where: str,
) -> Value:
    data = functions.is_loader(over)
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
            element(state, node, each, operand, functions.is_loader(operand))
            for each, operand in zip(targets, operands, strict=False)
        ]
    )


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
        state.evaluate(node.value)
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
