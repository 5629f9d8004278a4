"""Operators and comparisons."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ampwise_lint.interpreter.items import listed
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    FALSE,
    TRUE,
    Const,
    Gradient,
    Instance,
    ListValue,
    Model,
    Optimizer,
    Parameters,
    Ref,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    is_low,
    is_periodic,
    key_of,
    loop_of,
    truth,
)
from ampwise_lint.values.events import Elapsed


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


def compare(state: State, node: Node, left: Value, op: ast.cmpop, right: Value) -> Value:
    """A comparison: a constant where both sides are, else a condition with a key."""
    if isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn):
        positive = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}[type(op)]
        return negate(compare(state, node, left, positive(), right))
    if isinstance(op, ast.Is) and _is_made(left) and _is_made(right):
        same = left is right
        if same or key_of(left) != key_of(right):
            return TRUE if same else FALSE
    if isinstance(op, ast.Eq | ast.Is):
        equal = _equality(state, node, left, right)
        if equal is not None:
            return equal
    if isinstance(left, Const) and isinstance(right, Const | ListValue):
        known = _known_comparison(left, op, right)
        if known is not None:
            return TRUE if known else FALSE
    # Of what torch made on the host it is no number that is compared, but each of its values.
    made = [each for each in (left, right) if isinstance(each, Tensor)]
    if any(not each.host or each.op in library.FACTORIES for each in made):
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


def _is_made(value: Value) -> bool:
    """Whether it is an object that the code makes, which is no other one."""
    return isinstance(value, Instance) or (isinstance(value, Model) and value.node is not None)


def _equality(state: State, node: Node, left: Value, right: Value) -> Value | None:
    """``x is None``, ``x == True``, ``dtype == torch.float16``; None for any other comparison."""
    match left, right:
        case Const(), Const(value=None):
            return TRUE if left.value is None else FALSE
        case Gradient(), Const(value=None):
            return state.unknown(node)
        case (Const(value=None), Ref()) | (Ref(), Const(value=None)):
            return FALSE
        case Tensor(data=True, moved=True), Const(value=None):
            return FALSE  # None has no ``.to``
        case _, Const(value=None):
            return negate(left)
        case Unknown(), Const(value=bool(expected)):
            return left if expected else negate(left)
        case Unknown(of=Tensor() as asked, key=key), Ref(path=path) if key.endswith(".dtype"):
            # A branch for 16 bits that are seen nowhere is no sign of any.
            return FALSE if is_low(library.DTYPES.get(path)) and not is_low(asked.dtype) else None
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
    # Of the share of an epoch that is done, ``i / len(loader)``, one side has both.
    return any(
        "index of" in one and "len(" in other and "index of" not in other
        for one, other in (keys, keys[::-1])
    )


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
    if isinstance(left, Const) and isinstance(left.value, str):
        return Unknown(f"({key_of(left)} {name} {key_of(right)})")
    if name == "%" and isinstance(right, Const) and right.value == 1:
        return Const(0)
    if isinstance(left, Gradient) or isinstance(right, Gradient):
        return _of_gradient(node, name, left, right)
    lists = isinstance(right, ListValue | Parameters)
    if name == "add" and (isinstance(left, Parameters) or (isinstance(left, ListValue) and lists)):
        return listed(state, node, [*_items(left), *_items(right)])
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


def _items(value: Value) -> list[Value]:
    """What a list holds; parameters, which are many, are one item."""
    return value.items if isinstance(value, ListValue) else [value]


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
            tensors.shown(state, each, value, "% formatting")
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
