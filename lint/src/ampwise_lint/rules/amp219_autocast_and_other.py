"""# autocast-and-other

## What it does
Reports `with autocast(...) and other():`, and the same the other way round.

## Why is this bad
`a and b` is `b` where `a` is true, and a context manager is: only the last one is entered. With
autocast first, training runs in float32 without a word; with autocast last, the other (`no_grad`,
`no_sync`) does nothing.

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

from ampwise_lint.model.analysis import Analysis
from ampwise_lint.model.library import AUTOCASTS
from ampwise_lint.model.queries import edit
from ampwise_lint.rule import Mistake, rule


@rule("AMP219", "autocast-and-other", "error", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    module = code.module
    for node in module.index.of(ast.BoolOp):
        around = module.parents[id(node)]
        calls = [each for each in node.values if isinstance(each, ast.Call)]
        if not isinstance(around, ast.withitem) or not isinstance(node.op, ast.And):
            continue
        entered = [module.imports.full(each.func) in AUTOCASTS for each in calls]
        if not any(entered) or len(calls) != len(node.values):
            continue
        harm = (
            "the other one does nothing" if entered[-1] else "what is in the block runs in float32"
        )
        yield Mistake(
            node,
            module,
            f"`and` of two context managers enters only the last one: {harm}; put a comma between "
            "them",
            (edit("replace", node, ", ".join(map(module.text_of, calls))),),
        )
