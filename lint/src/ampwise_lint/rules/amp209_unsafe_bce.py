"""# unsafe-bce

## What it does
Reports `binary_cross_entropy` or `BCELoss` inside autocast. Silent for CPU autocast, which runs
it in float32.

## Why is this bad
CUDA autocast raises: "binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast." A
sigmoid in float16 is 1 for a logit of 10, so the loss of a wrong answer is 100 (where torch
clamps its logarithm) in place of 10.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        probability = torch.sigmoid(model(x))
        loss = F.binary_cross_entropy(probability, y)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, y)

## Fix safety
Unsafe: `--unsafe-fixes` writes the with-logits form and takes the sigmoid out, where it is seen:
in the argument, or in the line that binds a name which nothing else reads (a name like
`probability` then holds logits). `BCELoss` becomes `BCEWithLogitsLoss` where every use of it has
such a sigmoid. No fix where the sigmoid is part of the network: a cast up behind it would only
silence the error, as the 16-bit sigmoid is 0 or 1 already.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import (
    assignments,
    functions_of,
    grouped,
    has_torch,
    loads,
    scope_of,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.events import Op

SHAPES = ("squeeze", "unsqueeze", "view", "reshape", "flatten", "contiguous", "to", "float")
LIKE = (
    "ones_like",
    "zeros_like",
    "full_like",
    "rand_like",
    "randint_like",
    "shape",
    "size",
    "device",
)
"""What asks a tensor for no more than its shape."""


@rule("AMP209", "unsafe-bce", "error", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Op):
            region = event.context.region
            if event.path != "binary_cross_entropy" or region is None or region.device == "cpu":
                continue
            yield Mistake(
                event.node,
                event.module,
                "binary_cross_entropy (BCELoss) raises RuntimeError under CUDA autocast: in "
                "float16 the logarithm of a probability near 0 or 1 is lost; leave the sigmoid out "
                "and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)",
                mend=partial(_edits, event.module, event.node),
            )


# ---------------------------------------------------------------------- fixes


def _edits(module: Module, node: ast.AST) -> tuple[Edit, ...]:
    """The with-logits form of a call of ``binary_cross_entropy`` or of a ``BCELoss``."""
    if not isinstance(node, ast.Call):
        return ()
    if module.imports.full(node.func).endswith(".binary_cross_entropy"):
        name, logits = "binary_cross_entropy", _without_sigmoid(module, node)
        full = "torch.nn.functional.binary_cross_entropy_with_logits"
        renamed = _renamed(module, node.func, name, f"{name}_with_logits", full)
        return (*renamed, *logits) if renamed and logits else ()
    made = _made(module, node.func)
    if made is None:
        return ()
    uses = [node] if made is node.func else _uses(module, dotted(node.func))
    each_use = [_without_sigmoid(module, use) for use in uses]
    full = "torch.nn.BCEWithLogitsLoss"
    renamed = _renamed(module, made.func, "BCELoss", "BCEWithLogitsLoss", full)
    if not renamed or not all(each_use):
        return ()
    return (*renamed, *dict.fromkeys(e for found in each_use for e in found))


def _renamed(module: Module, function: ast.expr, old: str, new: str, full: str) -> tuple[Edit, ...]:
    """Another function of the same module; by its full name where the old one was imported."""
    if isinstance(function, ast.Attribute) and function.attr == old:
        return (edit("replace", function, f"{dotted(function.value)}.{new}"),)
    return (edit("replace", function, full),) if has_torch(module) else ()


def _made(module: Module, function: ast.expr) -> ast.Call | None:
    """The only place where the loss that is called is made."""
    if isinstance(function, ast.Call):
        return function if _is_bce(module, function) else None
    name = dotted(function)
    values = [each.value for each in assignments(module.tree, name)]
    match values:
        case [ast.Call() as only] if name and _is_bce(module, only):
            return only
        case _:
            return None


def _is_bce(module: Module, call: ast.Call) -> bool:
    return module.imports.full(call.func) in ("torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss")


def _uses(module: Module, name: str) -> list[ast.Call]:
    """All calls of a loss; none where it is handed on, or may be read under another name."""
    calls = [e for e in ast.walk(module.tree) if isinstance(e, ast.Call) and dotted(e.func) == name]
    return calls if len(calls) == len(loads(module.tree, name)) else []


def _without_sigmoid(module: Module, call: ast.Call) -> tuple[Edit, ...]:
    """Take the sigmoid out of what a loss is called with; empty where none is seen."""
    named = [each.value for each in call.keywords if each.arg == "input"]
    given = [*call.args[:1], *named]
    if not given:
        return ()
    sigmoid = _sigmoid(module, given[0])
    if sigmoid is not None:
        return _opened(module, sigmoid)
    return _of_name(module, given[0], call) if isinstance(given[0], ast.Name) else ()


def _opened(module: Module, sigmoid: ast.Call) -> tuple[Edit, ...]:
    inner = _inside(sigmoid)
    if inner is None:
        return ()
    is_owner = isinstance(module.parents[id(sigmoid)], ast.Attribute)
    text = grouped(module, inner) if is_owner else module.text_of(inner)
    return (edit("replace", sigmoid, text),)


def _of_name(module: Module, given: ast.Name, call: ast.Call) -> tuple[Edit, ...]:
    """The sigmoid of the line that binds the name, if the name is for this loss alone."""
    scope = scope_of(module, call)
    made = assignments(scope, given.id)
    if (
        len(made) != 1
        or made[0].value is None
        or functions_of(module, made[0]) != functions_of(module, call)
    ):
        return ()
    sigmoid = _sigmoid(module, made[0].value)
    if sigmoid is None:
        return ()
    if all(each is given or _is_shape_only(module, each) for each in loads(scope, given.id)):
        return _opened(module, sigmoid)
    # Others read the probabilities: the loss takes the logits, where they have a name of their own.
    logits = _inside(sigmoid) if sigmoid is made[0].value else None
    if isinstance(logits, ast.Name) and len(assignments(scope, logits.id)) == 1:
        return (edit("replace", given, logits.id),)
    return ()


def _is_shape_only(module: Module, node: ast.expr) -> bool:
    around = module.parents[id(node)]
    if isinstance(around, ast.Call):
        return dotted(around.func).rpartition(".")[2] in LIKE
    return isinstance(around, ast.Attribute) and around.attr in LIKE


def _sigmoid(module: Module, node: ast.expr) -> ast.Call | None:
    """The sigmoid an expression is, but for its shape."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "sigmoid":
            return node
        if node.func.attr not in SHAPES:
            return None
        node = node.func.value
    is_imported = isinstance(node, ast.Call) and module.imports.full(node.func).endswith(".sigmoid")
    return node if is_imported and isinstance(node, ast.Call) else None


def _inside(sigmoid: ast.Call) -> ast.expr | None:
    """What the sigmoid is taken of: ``x`` of ``torch.sigmoid(x)``, ``x.sigmoid()``."""
    if len(sigmoid.args) == 1 and not sigmoid.keywords:
        return sigmoid.args[0]
    is_method = isinstance(sigmoid.func, ast.Attribute) and not sigmoid.args
    return sigmoid.func.value if is_method and isinstance(sigmoid.func, ast.Attribute) else None
