"""# custom-function-without-custom-fwd

## What it does
Reports `forward` of a `torch.autograd.Function` that is applied under autocast, when neither it
nor `backward` has `custom_fwd` / `custom_bwd` or an autocast of its own. Silent where forward
returns its input and saves nothing (gradient reversal), and where backward only moves the gradient
or adds it up.

## Why is this bad
forward runs under autocast and saves its inputs as they came; backward runs with autocast off.
For a product of float32 tensors in a bfloat16 region the gradient is bfloat16 and the saved
tensors float32: RuntimeError "expected m1 and m2 to have the same dtype" (reproduced on a CPU).

## Example
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

## Use instead
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

## Fix safety
Unsafe: `--unsafe-fixes` decorates both, for the device of the region it is applied in (and
imports torch, if need be). backward then runs under the autocast of forward: what it computes may
change its dtype. Whether `cast_inputs=torch.float32` belongs there too depends on what the function
computes. No fix where the device is not known, for a method without `@staticmethod`, and with
`setup_context`, whose forward has no `ctx` for the decorator to write to. Needs torch 2.4.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source import library
from ampwise_lint.source.places import has_torch
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Class
from ampwise_lint.values.events import Applied


@rule("AMP214", "custom-function-without-custom-fwd", "warning", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Applied):
            region = event.context.region
            if region is None:
                continue
            class_ = event.class_
            forward = _method(class_.node, "forward")
            if forward is None or _method(class_.node, "backward") is None:
                continue
            if _passes_on(class_.node, forward) or _only_moves(class_.node):
                continue
            if not _is_prepared(class_.node):
                yield Mistake(
                    forward,
                    class_.module,
                    f"{class_.node.name} runs under autocast without custom_fwd and custom_bwd: "
                    "its forward gets whatever dtype comes, its backward runs with autocast off, "
                    "and the two meet in different dtypes; decorate both "
                    "(torch.amp.custom_fwd(device_type=...))",
                    mend=partial(_edits, class_, region.device),
                )


VIEWS = {"view_as", "view", "clone", "contiguous", "reshape", "detach", "expand_as"}


def _passes_on(class_: ast.ClassDef, forward: ast.FunctionDef) -> bool:
    """Whether forward returns its input and keeps no tensor: gradient reversal.

    Its backward has only the gradient to work with, in whatever dtype that comes.
    """
    returns = [each.value for each in ast.walk(forward) if isinstance(each, ast.Return)]
    inputs = {each.arg for each in forward.args.args[1:]}
    returned = {_viewed(each) if each is not None else "" for each in returns}
    kept = {
        dotted(each.value)
        for each in ast.walk(forward)
        if isinstance(each, ast.Assign) and not isinstance(each.targets[0], ast.Name)
    }
    saves = any(
        isinstance(each, ast.Attribute) and each.attr == "save_for_backward"
        for each in ast.walk(class_)
    )
    return bool(returned) and returned <= inputs and not saves and not kept & returned


MOVES = VIEWS | {
    "apply", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_empty", "new_full", "stack",
    "cat", "split", "chunk", "unbind", "narrow", "transpose", "permute", "squeeze", "unsqueeze",
    "size", "dim", "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all",
    "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "get_rank",
    "get_world_size", "is_initialized", "save_for_backward", "mark_dirty", "list", "tuple", "range",
    "len", "append", "enumerate", "zip",
}  # fmt: skip
"""What keeps a tensor's dtype, whatever autocast says."""


FORWARD = MOVES | library.PLAIN | library.COUNTS | library.FACTORIES | library.INTEGER | {
    "round", "sign", "floor", "ceil", "trunc", "mark_non_differentiable",
}  # fmt: skip
"""What promotes its inputs, or takes one."""
BACKWARD = MOVES | library.COUNTS


def _only_moves(class_: ast.ClassDef) -> bool:
    """Whether backward only moves the gradient, or adds it up: in whatever dtype that comes, it
    meets no other tensor, and autograd casts what comes out. forward multiplies no matrices.
    """
    forward, backward = _inside(class_, "forward"), _inside(class_, "backward")
    operators = [each.op for each in forward if isinstance(each, ast.BinOp)]
    return (
        _called(forward) <= FORWARD
        and _called(backward) <= BACKWARD
        and not any(isinstance(each, ast.MatMult) for each in operators)
        and not any(isinstance(each, ast.BinOp) for each in backward)
    )


def _inside(class_: ast.ClassDef, name: str) -> list[ast.AST]:
    method = _method(class_, name)
    return [node for each in (method.body if method else []) for node in ast.walk(each)]


def _called(nodes: list[ast.AST]) -> set[str]:
    """The names of what is called, also as methods of any expression."""
    functions = [each.func for each in nodes if isinstance(each, ast.Call)]
    return {getattr(each, "attr", getattr(each, "id", "")) for each in functions}


def _viewed(node: ast.expr) -> str:
    """The name of ``x`` in ``x.view_as(x)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return dotted(node.func.value) if node.func.attr in VIEWS else ""
    return dotted(node)


def _is_prepared(node: ast.ClassDef) -> bool:
    """Whether forward or backward says how it goes with autocast."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            names = [dotted(d.func if isinstance(d, ast.Call) else d) for d in each.decorator_list]
            if any(
                "custom_fwd" in name or "custom_bwd" in name or "autocast" in name for name in names
            ):
                return True
        elif isinstance(each, ast.Call) and "autocast" in dotted(each.func):
            return True
    return False


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return next((each for each in methods if each.name == name), None)


def _edits(class_: Class, device: str | None) -> tuple[Edit, ...]:
    """Decorate forward and backward below what they are decorated with."""
    methods = [_method(class_.node, name) for name in ("forward", "backward")]
    if device is None or _method(class_.node, "setup_context") is not None:
        return ()
    edits: list[Edit] = []
    for method, name in zip(methods, ("custom_fwd", "custom_bwd"), strict=True):
        if method is None:
            continue
        if not method.decorator_list:
            return ()
        text = f'torch.amp.{name}(device_type="{device}")'
        edits.append(edit("decorator", method.decorator_list[-1], text))
    return (*_import_torch(class_.module), *edits)


def _import_torch(module: Module) -> tuple[Edit, ...]:
    """``import torch`` before the first import that may have something before it."""
    if has_torch(module):
        return ()
    for each in module.tree.body:
        future = isinstance(each, ast.ImportFrom) and each.module == "__future__"
        if isinstance(each, ast.Import | ast.ImportFrom) and not future:
            return (edit("before", each, "import torch"),)
    return ()
