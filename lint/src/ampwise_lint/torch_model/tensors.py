"""What operations on tensors give: their dtype under autocast, and what of a loss they keep."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import dotted
from ampwise_lint.values.abstract import (
    Const,
    DictValue,
    Model,
    Region,
    Tensor,
    Unknown,
    Value,
    is_low,
    is_periodic,
    key_of,
)
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import HostSync, Loss, Op, Report

KEEPS = {
    "add",
    "sub",
    "mean",
    "sum",
    "squeeze",
    "view",
    "reshape",
    "clone",
    "flatten",
    "stack",
    "cat",
}


def low(region: Region) -> str:
    """The dtype a region computes in; ``low`` where the code does not tell."""
    if region.dtype:
        return region.dtype
    return {"cuda": "float16", "cpu": "bfloat16"}.get(region.device or "", "low")


def is_half_on_device(value: Value) -> bool:
    """Whether something is a tensor of 16 bits, which stays one when numbers are added."""
    return isinstance(value, Tensor) and is_low(value.dtype) and not value.host


def dtype_of(state: State, operation: str, inputs: Sequence[Value]) -> str | None:
    """The dtype of an operation's result where the path stands."""
    region = state.region
    if operation in library.INTEGER:
        return "int"
    if region is not None:
        if operation in library.OPS_LOW:
            return low(region)
        if operation in library.OPS_FLOAT32 and region.device != "cpu":
            return "int" if operation in library.COUNTS and _are_whole(inputs) else "float32"
    return widest(inputs)


def _are_whole(inputs: Sequence[Value]) -> bool:
    """Whether all tensors are of whole numbers, which autocast leaves alone."""
    dtypes = {each.dtype for each in inputs if isinstance(each, Tensor)}
    return dtypes == {"int"}


def widest(inputs: Sequence[Value]) -> str | None:
    """The dtype that type promotion gives; None where one input's is not known."""
    dtypes = [each.dtype for each in inputs if isinstance(each, Tensor) and each.dtype != "int"]
    if dtypes and any(map(_is_parameter, inputs)):
        dtypes.append(None)  # float32 unless the network was halved
    if not dtypes:
        return None
    if any(each in ("float32", "float64") for each in dtypes):
        return "float32"
    if any(each is None for each in dtypes):
        return None
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def _is_parameter(value: Value) -> bool:
    """Whether it is a parameter by itself that has dimensions: one of none promotes nothing."""
    if not isinstance(value, Model) or value.path not in PARAMETERS or value.node is None:
        return False
    calls = [e for e in ast.walk(value.node) if isinstance(e, ast.Call) and e is not value.node]
    return any(dotted(each.func).startswith("torch.") and _has_extent(each) for each in calls)


PARAMETERS = {"torch.nn.Parameter", "torch.nn.parameter.Parameter"}


def _has_extent(call: ast.Call) -> bool:
    """``torch.zeros(8, 8)``; neither ``torch.ones([])`` nor ``torch.tensor(0.07)``."""
    match call.args:
        case [ast.List(elts=[]) | ast.Tuple(elts=[]), *_]:
            return False
        case [_, *_]:
            return dotted(call.func) != "torch.tensor"
        case _:
            return False


def apply(
    state: State,
    node: Node,
    operation: str,
    inputs: Sequence[Value],
    arguments: Mapping[str, Value] | None = None,
) -> Tensor:
    """Apply an operation of torch: its result, written down as an event."""
    inputs = inputs[: library.OF_COUNTS.get(operation, len(inputs))]
    flat = flatten(inputs)
    tensors = [each for each in flat if isinstance(each, Tensor)]
    result = Tensor(
        key=f"{operation}@{node.lineno}:{node.col_offset}#{state.iteration}",
        dtype=dtype_of(state, operation, flat),
        guessed=operation not in library.OPS_LOW and any(each.guessed for each in tensors),
        region=state.region,
        op=operation,
        inputs=tuple(inputs),
        node=node,
        forward=any(each.forward for each in tensors),
        host=bool(tensors) and all(each.host or _is_as_loaded(each) for each in tensors),
        of=tensors[0].of if tensors else None,
    )
    if operation in KEEPS and tensors:
        _keep(result, tensors)
    if operation in library.LOSS_FUNCTIONS:
        result.loss = True
        state.emit(Loss, node, operation, tuple(inputs))
    state.emit(Op, node, operation, tuple(inputs), dict(arguments or {}), result)
    return result


def _is_as_loaded(tensor: Tensor) -> bool:
    """Whether it is a batch that nobody has moved to the device."""
    return tensor.data and not tensor.moved


def packed_sizes(of: Value) -> Tensor:
    """How many samples a PackedSequence has at each step: on the host, wherever its data is."""
    return Tensor(f"{key_of(of)}.{library.PACKED_SIZES}", "int", host=True)


def are_on_host(values: Sequence[Value]) -> bool:
    """Whether tensors were read to the host: what a network or loss makes of them is there, too.

    Batches that nobody has moved are there as well, but may be moved by what takes them.
    """
    tensors = [each for each in flatten(values) if isinstance(each, Tensor)]
    on_host = all(each.host or _is_as_loaded(each) for each in tensors)
    return on_host and any(each.host and each.of is not None for each in tensors)


def _keep(result: Tensor, tensors: Sequence[Tensor]) -> None:
    """What a sum of tensors keeps of its terms."""
    losses = [each for each in tensors if each.loss or each.scaled or each.divided] or list(tensors)
    result.scaled = next((each.scaled for each in losses if each.scaled is not None), None)
    result.divided = all(each.divided for each in losses)
    result.divisor = losses[0].divisor
    result.loss = any(each.loss for each in losses)
    result.grown = any(each.grown for each in losses)
    result.factor = losses[0].factor if len(losses) == 1 else None


def arithmetic(state: State, node: Node, name: str, left: Value, right: Value) -> Value:
    """An operator with a tensor on at least one side."""
    tensors = [each for each in (left, right) if isinstance(each, Tensor)]
    result = apply(state, node, name, (left, right))
    main = tensors[0]
    other = right if main is left else left
    if name in ("mul", "div", "floordiv"):
        source = next((each for each in tensors if each.loss or each.scaled), main)
        result.scaled, result.loss = source.scaled, source.loss
        result.divided, result.divisor = source.divided, source.divisor
        result.grown, result.factor = source.grown, source.factor
        result.grad_scaled = any(each.grad_scaled for each in tensors)
        if isinstance(other, Unknown) and other.scale:
            result.grad_scaled = False
            result.scaled = None
        if main.host:
            undone = not isinstance(_divisor(node, other), Const) and not _is_extent(other)
            if name == "mul" and (undone or _is_same(node, other, main.divisor)):
                result.divided = False  # multiplied back
        elif name == "mul" and main.divided and _is_same(node, other, main.divisor):
            result.divided = False  # multiplied back
        elif _is_no_share(node, name, left, _divisor(node, other)):
            pass
        elif (name == "div" and main is left) or (name == "mul" and not isinstance(other, Const)):
            result.divided = result.divided or not isinstance(other, Tensor) or other.host
            result.divisor = _divisor(node, other)
            if name == "mul":  # no division by what another loss may be divided by
                result.divisor = Unknown(f"1 / {key_of(result.divisor)}")
        elif isinstance(other, Const):
            result.factor = other
    return result


def _is_no_share(node: Node, name: str, left: Value, factor: Value) -> bool:
    """Whether it is weighted, or the mean of several losses: that divides by no window."""
    if name == "mul":
        return _is_weight(factor) or _is_by_name(node)
    return name == "div" and _is_mean_of_terms(left, factor)


def _is_mean_of_terms(total: Value, divisor: Value) -> bool:
    """``(real + fake) / 2``: the mean of two losses, and no share of a window."""
    return isinstance(divisor, Const) and divisor.value == _terms(total) > 1


def _terms(total: Value) -> int:
    """How many tensors a sum was made of."""
    if not isinstance(total, Tensor):
        return 0
    return sum(map(_terms, total.inputs)) if total.op == "add" else 1


def _is_same(node: Node, other: Value, divisor: Value | None) -> bool:
    return key_of(_divisor(node, other)) == key_of(divisor)


def _divisor(node: Node, other: Value) -> Value:
    """What a loss is divided by: a literal, or a setting, whose value here is only a default."""
    if isinstance(other, Const):
        operand = node.right if isinstance(node, ast.BinOp) else getattr(node, "value", None)
        if not isinstance(operand, ast.Constant | None):
            return Unknown(dotted(operand) or ast.unparse(operand))
    return other


def read(state: State, node: Node, tensor: Tensor | Unknown, how: str) -> Tensor:
    """A value is copied to the host, which waits for it; ``numpy`` only takes what is there."""
    if how != "numpy" and not (isinstance(tensor, Tensor) and tensor.host):
        state.emit(HostSync, node, tensor, how)
    if isinstance(tensor, Tensor):
        return tensor.but(host=True, of=tensor if tensor.of is None else tensor.of)
    return Tensor(key=key_of(tensor), host=True, of=tensor, loss="loss" in tensor.key)


CHECKS = {"isnan", "isinf", "isfinite"}


def decides(state: State, node: ast.expr, test: Value) -> None:
    """A branch is taken by what a tensor holds: the host waits to know."""
    # What numpy's functions of these names return has no dtype here.
    match test:
        case Unknown(op="not" | "and" | "or" as op, operands=operands):
            for each in operands:
                decides(state, node, each)
                if op == "and" and is_periodic([each]):
                    break  # what is behind it is asked for once in a window
        case Tensor(op="any" | "all", inputs=(Tensor(op=op, dtype="int"), *_)) if op in CHECKS:
            read(state, node, test, "a branch")
        case Tensor(op=op, dtype="int") if op in CHECKS:
            read(state, node, test, "a branch")
        case Tensor(op="eq" | "ne", inputs=(Tensor() as asked, *_)):
            decides(state, node, asked)  # ``torch.isnan(loss) == False``
        case _:
            pass


WEIGHT = re.compile(
    r"(^|[._'])(lambda|lamb|lam|alpha|beta|gamma|coeff?|w)(_\w+|\d+)?'?\]?$"
    r"|(weights?|lambdas?|coeff?s?)'?\]?( or [\d.]+\))?$"
    r"|(weights?|lambdas?|coeff?s?)(_dict|_map)?\[[^\]]*\]$"
)
"""Names of what one term of a loss is weighted with: a setting, and no share of a window."""


def _is_weight(value: Value) -> bool:
    return isinstance(value, Unknown) and bool(WEIGHT.search(value.key))


def _is_by_name(node: Node) -> bool:
    """``losses[k] * weight_dict[k]``: a weight out of a mapping, by what that is called."""
    factors = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(isinstance(e, ast.Subscript) and WEIGHT.search(ast.unparse(e)) for e in factors)


def _is_extent(value: Value) -> bool:
    """Whether a number counts the samples of a batch: a weight, which undoes no division."""
    return isinstance(value, Unknown) and bool(EXTENT.search(value.key))


EXTENT = re.compile(r"\.(size|shape|numel)\b|\blen\(")
"""Sizes: as keys of values have them, and as they are written."""


def is_rescaled(node: ast.expr) -> bool:
    """Whether a number is multiplied before it is reported, but for the size of a batch."""
    return any(
        isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Mult)
        and not any(EXTENT.search(ast.unparse(side)) for side in (each.left, each.right))
        for each in ast.walk(node)
    )


def shown(state: State, node: ast.expr, value: Value, how: str, *, waits: bool = True) -> None:
    """A value is printed or logged, by a function called `how`, or made a text of."""
    if not isinstance(value, Tensor):
        return
    # What a dict holds that is no network's output may be numbers.
    if not value.host and waits and not value.data and value.op != "items":
        state.emit(HostSync, node, value, how, shows=True)
    state.emit(Report, node, value, "", is_rescaled(node))


def shown_all(state: State, node: ast.Call, values: Sequence[Value], *, waits: bool) -> None:
    """The arguments of a call that prints or logs."""
    how = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
    nodes = [*node.args, *(each.value for each in node.keywords)]
    for each, value in zip(nodes, values, strict=False):
        if isinstance(value, DictValue):
            made = value.node
            here = isinstance(made, ast.Dict) and (made is each or state.here.holds(made))
            inner = made.values if here and isinstance(made, ast.Dict) else []
            for part, item in zip(inner, value.items.values(), strict=False):
                shown(state, part, item, how, waits=waits)
        elif not isinstance(each, ast.JoinedStr):
            shown(state, each, value, how, waits=waits)
