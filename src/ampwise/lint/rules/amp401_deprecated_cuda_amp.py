"""# deprecated-cuda-amp

## What it does
Reports imports from `torch.cuda.amp` and `torch.cpu.amp`, and uses of these by their full path.

## Why is this bad
autocast, GradScaler, custom_fwd and custom_bwd of these modules issue a FutureWarning when they
are used: "`torch.cuda.amp.autocast(args...)` is deprecated." They name one device, so the code
cannot run on another.

## Example
    from torch.cuda.amp import GradScaler, autocast

    scaler = GradScaler()
    with autocast():
        loss = criterion(model(x), y)

## Use instead
    from torch.amp import GradScaler, autocast

    scaler = GradScaler("cuda")
    with autocast("cuda"):
        loss = criterion(model(x), y)

## Fix safety
Safe: `--fix` changes import and calls and names the device. The old classes derive from the new
ones, so behaviour stays the same. Imports that bring other names along are left to the author.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise.lint.findings import Edit
from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.imports import Imports, uses
from ampwise.lint.model.nodes import Node
from ampwise.lint.model.queries import edit
from ampwise.lint.model.roles import dotted
from ampwise.lint.project import Module
from ampwise.lint.rule import Mistake, rule

OLD = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
HOMES = (*OLD, *(f"{old}.{each}" for old in OLD for each in ("autocast_mode", "grad_scaler")))
NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")


@rule("AMP401", "deprecated-cuda-amp", "warning", fix="safe")
def check(code: Analysis) -> Iterator[Mistake]:
    found = code.module.imports
    for statement, names in found.statements:
        old = [each for each in names if _old_home(each)]
        if old:
            edits = _import_edits(statement)
            uses_too = _use_edits(code.module, statement) if edits else ()
            yield _mistake(statement, code.module, old[0], (*edits, *uses_too))
    for node, full in uses(code.module):
        home = _old_home(full)
        if isinstance(node, ast.Name) or _from_alias(found, node):
            continue  # its import is reported
        if home and full != home:
            yield _mistake(node, code.module, full, _path_edits(code.module, node, full))


def _old_home(name: str) -> str:
    return next((old for old in OLD if name == old or name.startswith(f"{old}.")), "")


def _from_alias(found: Imports, node: Node) -> bool:
    """Whether a use starts at an import that is reported itself: ``from torch.cuda import amp``."""
    first = node
    while isinstance(first, ast.Attribute):
        first = first.value
    return isinstance(first, ast.Name) and bool(_old_home(found.names.get(first.id, "")))


def _mistake(node: Node, module: Module, name: str, edits: tuple[Edit, ...]) -> Mistake:
    home = _old_home(name)
    device, last = OLD[home], name.rpartition(".")[2]
    new = {"autocast": "torch.amp.autocast", "GradScaler": "torch.amp.GradScaler"}.get(
        last, f"torch.amp.{last}" if last in NAMES else "torch.amp"
    )
    how = (
        f'{new}("{device}", ...)'
        if last in ("autocast", "GradScaler")
        else (
            f'{new}(device_type="{device}")'
            if last == "custom_fwd" or last == "custom_bwd"
            else new
        )
    )
    return Mistake(
        node,
        module,
        f"{name} is deprecated: it warns on every call and goes away; use {how}",
        edits,
    )


def _import_edits(statement: ast.Import | ast.ImportFrom) -> tuple[Edit, ...]:
    """The same names from ``torch.amp``; nothing where other names come along."""
    old = statement.names
    if isinstance(statement, ast.Import):
        if len(old) == 1 and old[0].asname and old[0].name in OLD:
            return (edit("replace", statement, f"import torch.amp as {old[0].asname}"),)
        return ()
    names = ", ".join(f"{e.name} as {e.asname}" if e.asname else e.name for e in old)
    if statement.module in HOMES and all(each.name in NAMES for each in old):
        return (edit("replace", statement, f"from torch.amp import {names}"),)
    if statement.module in ("torch.cuda", "torch.cpu") and [e.name for e in old] == ["amp"]:
        return (edit("replace", statement, f"from torch import {names}"),)
    return ()


def _use_edits(module: Module, statement: ast.Import | ast.ImportFrom) -> tuple[Edit, ...]:
    """The device that calls of what a statement imports must say."""
    bound = {each.asname or each.name for each in statement.names}
    edits: list[Edit] = []
    for node, full in uses(module):
        is_old = full.rpartition(".")[2] in NAMES and _old_home(full)
        if is_old and dotted(node).partition(".")[0] in bound:
            edits += _with_device(module, node, full)
    return tuple(edits)


def _path_edits(module: Module, node: ast.Attribute | ast.Name, full: str) -> tuple[Edit, ...]:
    last = full.rpartition(".")[2]
    if last not in NAMES or full.count(".") != 3:
        return ()
    base = ast.unparse(node).partition(".")[0]
    return (edit("replace", node, f"{base}.amp.{last}"), *_with_device(module, node, full))


def _with_device(module: Module, node: Node, full: str) -> list[Edit]:
    """Name the device in a call, or make a bare decorator a call."""
    device, last = OLD[_old_home(full)], full.rpartition(".")[2]
    keyword = "device_type=" if last in ("custom_fwd", "custom_bwd") else ""
    parent = module.parents[id(node)]
    text = f'{keyword}"{device}"'
    if isinstance(parent, ast.Call) and parent.func is node:
        return [edit("argument", parent, text if keyword else f"0:{_shift(parent, last, text)}")]
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and node in parent.decorator_list:
        return [edit("decorate", node, f"({text})")]
    return []


def _shift(call: ast.Call, last: str, text: str) -> str:
    """The device goes first; what was first there, ``enabled``, gets its name."""
    return f"{text}|enabled" if last == "autocast" and call.args else text
