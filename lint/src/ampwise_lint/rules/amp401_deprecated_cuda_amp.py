"""# deprecated-cuda-amp

## What it does
Reports imports from `torch.cuda.amp` and `torch.cpu.amp`, and uses of these by their full path.
Names that are not called are reported as info: those of types, and imports that nothing uses. So
is what has to stay: where the project's requirements (pyproject.toml, setup.py, setup.cfg,
requirements.txt, environment.yml) allow no version of torch that has the new name: autocast came
with 1.12, GradScaler with 2.3, the decorators with 2.4. Silent in a branch for other versions of
torch, where the check has a branch with the new names, and for full paths in annotations that
Python does not evaluate (`from __future__ import annotations`).

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
ones, so behaviour stays the same. Left to the author, with the reason: imports that bring other
names along, names that are handed on (`ctx = autocast if amp else nullcontext`: whoever calls that
would have to name the device) or bound twice, and arguments by `*`. What stands behind a check for
other versions of torch (`try` with `except ImportError`, a comparison) that knows no new name, or
in a project whose requirements allow no version with the new name, is reported as info and never
edited. Unsafe where they allow older versions as well (`torch>=1.8`), which the new name breaks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit, Safety, Severity
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.imports import Imports
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import is_never_read, is_type, names_bound_by
from ampwise_lint.source.project import Module
from ampwise_lint.source.requirements import Version
from ampwise_lint.source.roles import dotted
from ampwise_lint.source.versions import has_newer, is_for_versions
from ampwise_lint.triggers import OLD_PACKAGES

OLD = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
HOMES = (*OLD, *(f"{old}.{each}" for old in OLD for each in ("autocast_mode", "grad_scaler")))
SINCE: dict[str, Version] = {
    "autocast": (1, 12),
    "GradScaler": (2, 3),
    "custom_fwd": (2, 4),
    "custom_bwd": (2, 4),
}
"""The first version of torch whose torch.amp has a name; torch.amp itself came with autocast."""
NEW = re.compile(
    r"\btorch\.(amp|autocast|GradScaler)\b|from torch import [^\n]*\b(amp|autocast|GradScaler)\b"
)
"""What other versions of torch have instead."""
ORDER = ("enabled", "dtype", "cache_enabled")
"""Arguments of the old autocast, by position."""

Use = Literal["call", "type", "none"]
"""What is done with an old name: called (or handed on), named as a type, nothing."""
Edits = tuple[Edit, ...] | None
"""What makes a use a right one of the new name; None where that is not known."""


@rule("AMP401", "deprecated-cuda-amp", "warning", fix="safe", triggers=(OLD_PACKAGES,))
def check(code: Analysis) -> Iterator[Mistake]:
    module, found = code.module, code.module.imports
    for statement, names in found.statements:
        old = [each for each in names if _old_home(each)]
        if old and not has_newer(module, statement, NEW):
            edits = _import_edits(module, statement)
            use = _use_of(module, statement.names)
            told = _first_of_use(module, statement, names, use)
            yield _mistake(statement, module, told, _newest(module, old), use, edits)
    for node, full in module.imports.uses(module.index):
        home = _old_home(full)
        if isinstance(node, ast.Name) or _from_alias(found, node):
            continue  # its import is reported
        if not home or full == home or is_never_read(module, node):
            continue
        if not has_newer(module, node, NEW):
            use = "type" if is_type(module, node) else "call"
            yield _mistake(node, module, full, full, use, _path_edits(module, node, full))


def _old_home(name: str) -> str:
    return next((old for old in OLD if name == old or name.startswith(f"{old}.")), "")


def _from_alias(found: Imports, node: Node) -> bool:
    """Whether a use starts at an import that is reported itself: ``from torch.cuda import amp``."""
    return bool(_old_home(found.names.get(_first(node), "")))


def _first(node: ast.AST) -> str:
    return dotted(node).partition(".")[0]


def _first_of_use(
    module: Module, statement: ast.Import | ast.ImportFrom, names: list[str], use: Use
) -> str:
    """Of the old names that a statement imports, the first one that is used as is told."""
    old = [each for each in zip(statement.names, names, strict=True) if _old_home(each[1])]
    used = (name for alias, name in old if _use_of(module, [alias]) == use)
    return next(used, old[0][1])


def _use_of(module: Module, aliases: list[ast.alias]) -> Use:
    """What is done with the names that a statement imports; a package hands them on."""
    bound = {each.asname or each.name.partition(".")[0] for each in aliases}
    every = module.imports.uses(module.index)
    uses: list[ast.AST] = [e for e, full in every if _first(e) in bound and _old_home(full)]
    uses += [each for each in module.index.of(ast.Constant) if _spells(module, each, bound)]
    if not uses and module.path.name != "__init__.py":
        return "none"
    return "type" if uses and all(is_type(module, each) for each in uses) else "call"


def _spells(module: Module, text: ast.expr, names: set[str]) -> bool:
    """Whether a string is one of some names, as in ``__all__``, or a type that has one in it."""
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        return False
    is_name = text.value in names
    return is_name or (not names.isdisjoint(WORD.findall(text.value)) and is_type(module, text))


WORD = re.compile(r"\w+")


def _newest(module: Module, old: list[str]) -> str:
    """Of old names that are imported, and those that are used by way of them, the one that
    torch.amp has had last.
    """
    uses = [full for _, full in module.imports.uses(module.index)]
    taken = [each for each in uses if any(each.startswith(f"{name}.") for name in old)]
    return max(old + taken, key=_since)


def _since(name: str) -> Version:
    """The first version of torch with what becomes of an old name."""
    return SINCE.get(name.rpartition(".")[2], SINCE["autocast"])


def _mistake(node: Node, module: Module, name: str, newest: str, use: Use, edits: Edits) -> Mistake:
    told = f"{name} is deprecated: {GOES[use]}"
    if is_for_versions(module, node):
        told += "; here it is for another version of torch, which may need it"
        return Mistake(node, module, told, severity="info")
    versions, since = module.project.requirements.of(module.path), _since(newest)
    last = newest.rpartition(".")[2]
    new = f"torch.amp.{last}" if last in SINCE else "torch.amp"
    new += f" came with {'.'.join(map(str, since))}"
    if (asked := versions.all_before(since)) is not None:
        told = (
            f"{name} is deprecated in newer versions of torch; here it stays, as {new}, and "
            f"{asked.file} asks for torch {asked.words}"
        )
        return Mistake(node, module, told, severity="info")
    told += _instead(name) if use == "call" else f"; {INSTEAD[use]} torch.amp"
    if edits is None:
        told += " (not done here: a use of it may be more than a call)"
    fix: Safety | None = None
    if edits and (asked := versions.some_before(since)) is not None:
        told += f" ({new}, and {asked.file} asks for torch {asked.words})"
        fix = "unsafe"
    severity: Severity | None = None if use == "call" else "info"
    return Mistake(node, module, told, edits or (), severity=severity, fix=fix)


GOES: dict[Use, str] = {
    "call": "it warns on every call and goes away",
    "type": "it goes away, and the type with it (nothing here calls it, so nothing warns)",
    "none": "it goes away, and its import fails then; nothing in this file uses it",
}
INSTEAD: dict[Use, str] = {
    "type": "name that of",
    "none": "drop it, or import it from",
}


def _instead(name: str) -> str:
    device, last = OLD[_old_home(name)], name.rpartition(".")[2]
    if last in ("autocast", "GradScaler"):
        return f'; use torch.amp.{last}("{device}", ...)'
    return f'; use torch.amp.{last}(device_type="{device}")' if last in SINCE else "; use torch.amp"


# ---------------------------------------------------------------------- imports


def _import_edits(module: Module, statement: ast.Import | ast.ImportFrom) -> Edits:
    """The same names from ``torch.amp``, and the device in each call of them."""
    text = _new_import(statement)
    bound = {each.asname or each.name for each in statement.names}
    if not text:
        return ()
    if not bound.isdisjoint(_bound_otherwise(module)):
        return None
    edits = [edit("replace", statement, text)]
    for node, full in module.imports.uses(module.index):
        if _first(node) in bound:
            changed = _with_device(module, node, full)
            if changed is None:
                return None
            edits += changed
    only_handed_on = len(edits) == 1 and module.path.name == "__init__.py"
    return None if only_handed_on else tuple(edits)


def _new_import(statement: ast.Import | ast.ImportFrom) -> str:
    """An import of the new names; empty where other names come along."""
    old = statement.names
    if isinstance(statement, ast.Import):
        if len(old) == 1 and old[0].asname and old[0].name in OLD:
            return f"import torch.amp as {old[0].asname}"
        return ""
    names = ", ".join(f"{e.name} as {e.asname}" if e.asname else e.name for e in old)
    if statement.module in HOMES and all(each.name in SINCE for each in old):
        return f"from torch.amp import {names}"
    if statement.module in ("torch.cuda", "torch.cpu") and [e.name for e in old] == ["amp"]:
        return f"from torch import {names}"
    return ""


def _bound_otherwise(module: Module) -> set[str]:
    """Names that something else binds than an import that is to be changed, or that go out."""
    found = names_bound_by(module.tree)
    for statement, names in module.imports.statements:
        is_old = all(map(_old_home, names)) and not is_for_versions(module, statement)
        if not is_old:
            found |= {each.asname or each.name for each in statement.names}
    return found


# ---------------------------------------------------------------------- uses


def _path_edits(module: Module, node: ast.Attribute | ast.Name, full: str) -> Edits:
    last = full.rpartition(".")[2]
    base = _first(node)
    if module.imports.names.get(base, base) != "torch":
        return ()
    changed = _with_device(module, node, full)
    if changed is None:
        return None
    return (edit("replace", node, f"{base}.amp.{last}"), *changed)


def _with_device(module: Module, node: Node, full: str) -> Edits:
    """Name the device in a call, or make a bare decorator a call."""
    home, _, last = full.rpartition(".")
    if last not in SINCE or home not in OLD:
        return None
    parent = module.parents[id(node)]
    if isinstance(parent, ast.Call) and parent.func is node:
        return _in_call(parent, last, OLD[home])
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and node in parent.decorator_list:
        keyword = "device_type=" if last in ("custom_fwd", "custom_bwd") else ""
        return (edit("decorate", node, f'({keyword}"{OLD[home]}")'),)
    return () if is_type(module, node) else None


def _in_call(call: ast.Call, last: str, device: str) -> Edits:
    given = {each.arg for each in call.keywords}
    if last in ("custom_fwd", "custom_bwd"):
        wanted = edit("argument", call, f'device_type="{device}"')
        return () if "device_type" in given else (wanted,)
    if ("device_type" if last == "autocast" else "device") in given:
        return None if call.args else ()
    match call.args:
        case [ast.Constant(value=str(said)), *_]:  # meant for the new name already
            return () if said.partition(":")[0] == device else None
        case [*_, ast.Starred()] | [ast.Starred(), *_]:
            return None
        case _:
            pass
    shifted = ORDER[: len(call.args)] if last == "autocast" else ()
    if given.intersection(shifted) or (last == "autocast" and len(call.args) > len(ORDER)):
        return None
    return (edit("argument", call, f'0:"{device}"' + f"|{','.join(shifted)}" * bool(shifted)),)
