"""Expressions as terms: what is computed, however it is spelled.

``torch.log(x)``, ``x.log()`` and ``F.softmax(x, dim=1)`` become an operation with named parameters;
``x ** 2``, ``x * x`` and ``x.pow(2)`` all become ``square(x)``. What is none of torch's operations,
such as the call of a module, is a leaf.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from ampwise.numerics.remedy.patches.source import SourceFile, code_of, dotted, same

_REDUCTION = ("input", "dim", "keepdim")
_UNARY = ("input",)
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square",
         "reciprocal", "neg", "sigmoid", "tanh", "sin", "cos", "tan", "asin", "acos", "atan",
         "sinh", "cosh", "asinh", "acosh", "atanh", "abs", "half", "bfloat16", "float", "double",
         "relu", "mT", "logsigmoid", "detach", "numel", "size"), _UNARY),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "logsumexp", "all", "any"), _REDUCTION),
    **dict.fromkeys(("max", "min", "cumsum", "cumprod"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("softmax", "log_softmax"), ("input", "dim", "dtype")),
    **dict.fromkeys(("add", "sub", "mul", "div", "matmul", "maximum", "minimum"),
                    ("input", "other")),
    "pow": ("input", "exponent"),
    "softplus": ("input", "beta", "threshold"),
    "var": ("input", "dim", "unbiased", "keepdim"),
    "std": ("input", "dim", "unbiased", "keepdim"),
    "norm": ("input", "p", "dim", "keepdim"),
    "vector_norm": ("input", "ord", "dim", "keepdim"),
    "normalize": ("input", "p", "dim", "eps"),
    "cosine_similarity": ("x1", "x2", "dim", "eps"),
    "clamp": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
    "masked_fill": ("input", "mask", "value"),
    "masked_fill_": ("input", "mask", "value"),
    "full_like": ("input", "fill_value"),
    "full": ("size", "fill_value"),
    "fill_": ("input", "value"),
    "where": ("condition", "input", "other"),
    "transpose": ("input", "dim0", "dim1"),
    "softmin": ("input", "dim"),
    "dropout": ("input", "p", "training"),
    "binary_cross_entropy": ("input", "target", "weight"),
    "nll_loss": ("input", "target", "weight"),
    "cross_entropy": ("input", "target", "weight"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "zeros_like": _UNARY, "ones_like": _UNARY,
}  # fmt: skip
"""Operations that are understood, and their parameters in order; the first is a method's own."""

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
_SAME = {
    "bmm": "matmul", "mm": "matmul", "true_divide": "div", "divide": "div", "multiply": "mul",
    "subtract": "sub", "negative": "neg", "arccos": "acos", "arcsin": "asin", "clip": "clamp",
    "absolute": "abs", "expit": "sigmoid", "log_sigmoid": "logsigmoid",
}  # fmt: skip
_OPERATORS: Mapping[type[cst.BaseBinaryOp], str] = {
    cst.Add: "add", cst.Subtract: "sub", cst.Multiply: "mul", cst.Divide: "div",
    cst.MatrixMultiply: "matmul", cst.Power: "pow",
}  # fmt: skip
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
_HOMES = ("torch.", "torch.nn.functional.", "torch.special.", "torch.linalg.")
_TRANSPOSED = ({"-1", "-2"}, {"1", "2"}, {"2", "3"})


ELEMENTWISE = frozenset(
    ["add", "sub", "mul", "div", "neg", "square", "pow", "sum", "mean", "prod", "cumsum", "cumprod",
     "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "abs",
     "var", "std", "norm", "vector_norm", "normalize", "cosine_similarity", "softmax",
     "log_softmax", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "where", "maximum",
     "minimum", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
     "atanh", "logsumexp", "nll_loss", "cross_entropy", "softplus", "layer_norm", "rms_norm",
     "masked_fill"]
)  # fmt: skip
"""Operations that compute in the format of their operands, or in float32, under autocast."""

TENSORS = ("input", "other", "x1", "x2")
"""Parameters of operations that are tensors."""


@dataclass(frozen=True, eq=False)
class Term:
    """An operation with its parameters; or, without an `op`, anything.

    Attributes
    ----------
    value
        Of a constant.
    nodes
        Where the operation stands: usually one node, more where several are one operation.
    """

    node: cst.BaseExpression
    op: str = ""
    parameters: Mapping[str, Term] = field(default_factory=dict[str, "Term"])
    value: Any = None

    @property
    def is_constant(self) -> bool:
        """Whether it is a number or a truth value."""
        return isinstance(self.value, int | float)

    def get(self, name: str) -> Term | None:
        """A parameter, if it was given."""
        return self.parameters.get(name)

    def below(self) -> Iterator[Term]:
        """It and the terms in it."""
        yield self
        for each in self.parameters.values():
            yield from each.below()


def constant(node: cst.BaseExpression) -> Any:
    """The number or truth value that an expression is; None for anything else."""
    try:
        value = ast.literal_eval(code_of(node).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, int | float) else None


def read(source: SourceFile, node: cst.BaseExpression) -> Term:
    """The term of an expression."""
    if node not in source.memo:
        source.memo[node] = _read(source, node)
    return source.memo[node]


def _read(source: SourceFile, node: cst.BaseExpression) -> Term:
    if (value := constant(node)) is not None:
        return Term(node, value=value)
    if isinstance(node, cst.BinaryOperation):
        op = _OPERATORS.get(type(node.operator), "")
        return _normal(source, node, op, [node.left, node.right], {})
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        return _normal(source, node, "neg", [node.expression], {})
    if isinstance(node, cst.Attribute) and node.attr.value in ("mT", "T"):
        return _normal(source, node, "mT", [node.value], {})
    if isinstance(node, cst.Call):
        return _call(source, node)
    return Term(node)


def _call(source: SourceFile, node: cst.Call) -> Term:
    if any(each.star for each in node.args):
        return Term(node)
    args = [each.value for each in node.args if each.keyword is None]
    keywords = {each.keyword.value: each.value for each in node.args if each.keyword is not None}
    full = source.full(node.func)
    if full.startswith(_HOMES):
        op = full.rpartition(".")[2]
        if op == "softmax" and "functional" in full:
            args = [*args[:2], *args[3:]]  # its third is for internal use
        return _normal(source, node, op, args, keywords)
    if not isinstance(node.func, cst.Attribute) or full or dotted(node.func.value) == "self":
        return Term(node)
    op = node.func.attr.value
    if op == "where" and args:  # of a tensor: x.where(condition, other)
        args = [args[0], node.func.value, *args[1:]]
        return _normal(source, node, op, args, keywords)
    return _normal(source, node, op, [node.func.value, *args], keywords)


def _normal(
    source: SourceFile,
    node: cst.BaseExpression,
    op: str,
    args: list[cst.BaseExpression],
    keywords: dict[str, cst.BaseExpression],
) -> Term:
    """An operation in the one form that patterns are written in."""
    op = _SAME.get(op, op)
    names = PARAMETERS.get(op)
    if names is None or len(args) > len(names):
        return Term(node)
    given = {**dict(zip(names, args, strict=False)),
             **{_ALIASES.get(name, name): each for name, each in keywords.items()}}  # fmt: skip
    if op == "pow" and (power := _POWERS.get(constant(given["exponent"]) or 0)):
        op, given = power, {"input": given["input"]}
    if op == "mul" and same(given["input"], given["other"]):
        op, given = "square", {"input": given["input"]}
    if op == "div" and constant(given["input"]) == 1:
        inner = read(source, given["other"])
        if inner.op == "sqrt":
            return Term(node, "rsqrt", inner.parameters)
        op, given = "reciprocal", {"input": given["other"]}
    if op == "transpose":
        swapped = {str(constant(given[name])) for name in ("dim0", "dim1") if name in given}
        if swapped in _TRANSPOSED:
            op, given = "mT", {"input": given["input"]}
    return Term(node, op, {name: read(source, each) for name, each in given.items()})
