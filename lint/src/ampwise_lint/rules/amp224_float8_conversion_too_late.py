"""# float8-conversion-too-late

## What it does
Reports torchao's `convert_to_float8_training(model)` after `fully_shard(model)`, and, where its
config has `enable_fsdp_float8_all_gather=True`, after an optimizer was made of the model's
parameters. Only where both stand in one function, one before the other on every way through it.

## Why is this bad
The conversion puts new modules in place of the linear layers. FSDP2 has noted the old ones: the
new ones keep the shards, and the first forward raises "aten.mm.default got mixed torch.Tensor and
DTensor". With float8 all-gather the weights are new parameters, too: an optimizer that was made
before holds the old ones, gets no gradient for them, and trains all but these weights, without a
word.

## Example
    fully_shard(model)
    convert_to_float8_training(model)

## Use instead
    convert_to_float8_training(model)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

## Fix safety
No automatic fix: lines change places, and what stands between them may need the one or the other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import CONVERT_TO_FLOAT8, FULLY_SHARD, is_optimizer
from ampwise_lint.source.places import block_of, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import FLOAT8


@rule("AMP224", "float8-conversion-too-late", "error", triggers=(FLOAT8,))
def check(code: Analysis) -> Iterator[Mistake]:
    module = code.module
    for call in module.index.of(ast.Call):
        if module.imports.full(call.func) in CONVERT_TO_FLOAT8 and call.args:
            for before in _certainly_before(module, call):
                if told := _too_late(module, call, before):
                    yield Mistake(call, module, told)
                    break


def _too_late(module: Module, call: ast.Call, before: ast.Call) -> str:
    """What is wrong about a conversion after another call; empty if nothing is."""
    model, path = module.unparsed(call.args[0]), module.imports.full(before.func)
    if path in FULLY_SHARD:
        if [module.unparsed(each) for each in before.args[:1]] == [model]:
            return (
                f"{model} is sharded already: FSDP2 knows the layers that this replaces, and the "
                "first forward raises (mixed torch.Tensor and DTensor); convert first, then "
                "fully_shard"
            )
        return ""
    held = is_optimizer(path) and [module.unparsed(each) for each in before.args[:1]]
    if held == [f"{model}.parameters()"] and _gathers_float8(module, call):
        return (
            f"float8 all-gather puts new parameters into {model}, and the optimizer on line "
            f"{before.lineno} holds the old ones: the weights of all converted layers are never "
            "trained; make the optimizer after the conversion"
        )
    return ""


def _gathers_float8(module: Module, call: ast.Call) -> bool:
    """Whether the config of a conversion, as it is written, has float8 all-gather."""
    config = next((each.value for each in call.keywords if each.arg == "config"), None)
    if isinstance(config, ast.Name):
        config = _only_value(module, call, config.id)
    return isinstance(config, ast.Call) and any(
        each.arg == "enable_fsdp_float8_all_gather"
        and isinstance(each.value, ast.Constant)
        and each.value.value is True
        for each in config.keywords
    )


def _only_value(module: Module, call: ast.Call, name: str) -> ast.expr | None:
    """What a name is in the function around a call, where it is set once there."""
    values = [
        each.value
        for each in ast.walk(scope_of(module, call))
        if isinstance(each, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in each.targets)
    ]
    return values[0] if len(values) == 1 else None


def _certainly_before(module: Module, call: ast.Call) -> Iterator[ast.Call]:
    """Calls that have been made when a call is, in its function; none from before a new model."""
    statement, model = module.statement_of(call), module.unparsed(call.args[0])
    end = scope_of(module, call)
    while True:
        block = block_of(module, statement)
        for earlier in reversed(block[: block.index(statement)]):
            made = _call_of(earlier)
            if made is not None:
                yield made
            if _sets(module, earlier, model) and not _passes_on(module, made, model):
                return
        around = module.parents.get(id(statement))
        while around is not None and around is not end and not isinstance(around, ast.stmt):
            around = module.parents.get(id(around))
        if around is None or around is end or not isinstance(around, ast.stmt):
            return
        statement = around


def _call_of(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement consists of, with or without a name for what it returns."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _sets(module: Module, statement: ast.stmt, model: str) -> bool:
    """Whether a statement, or one inside it, gives the model's name to something."""
    targets = [
        target
        for each in ast.walk(statement)
        if isinstance(each, ast.Assign)
        for target in each.targets
    ]
    return any(module.unparsed(each) == model for each in targets)


def _passes_on(module: Module, call: ast.Call | None, model: str) -> bool:
    """Whether it gives it to what a call makes of that very model."""
    return call is not None and [module.unparsed(each) for each in call.args[:1]] == [model]
