"""# autocast-and-other

## What it does
Reports `with autocast(...) and other():`, and the same the other way round.

## Why is this bad
`a and b` is `b` where `a` is true, and a context manager is: only the last one is entered. With
autocast first, what is inside runs as it would without, mostly in float32, and says no word; with
autocast last, the other (`no_grad`, `no_sync`) does nothing.

## Example
    with torch.autocast("cuda", dtype=torch.float16) and model.no_sync():
        loss = criterion(model(x), y)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16), model.no_sync():
        loss = criterion(model(x), y)

## Fix safety
Unsafe: `--unsafe-fixes` writes a comma. What was switched off by mistake is then on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import AUTOCASTS
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import AUTOCAST


@rule("AMP219", "autocast-and-other", "error", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    module = code.module
    for node in module.index.of(ast.BoolOp):
        around = module.parents[id(node)]
        if not isinstance(around, ast.withitem) or not isinstance(node.op, ast.And):
            continue
        entered = [_is_autocast(module, each) for each in node.values]
        others = all(isinstance(each, ast.Call) for each in node.values)
        if not any(entered[:-1]) and not (entered[-1] and others):
            continue  # what stands before an autocast may be a condition
        harm = (
            "the other one does nothing"
            if entered[-1]
            else "what is in the block runs as it would without autocast"
        )
        yield Mistake(
            node,
            module,
            f"`and` of two context managers enters only the last one: {harm}; put a comma between "
            "them",
            (edit("replace", node, ", ".join(map(partial(_alone, module), node.values))),),
        )


def _is_autocast(module: Module, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and module.imports.full(node.func) in AUTOCASTS


def _alone(module: Module, node: ast.expr) -> str:
    """An operand as it may stand between commas."""
    text = module.text_of(node)
    return text if isinstance(node, ast.Call | ast.Name | ast.Attribute) else f"({text})"
