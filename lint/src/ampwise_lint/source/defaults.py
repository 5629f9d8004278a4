"""What options and parameters of a file are where nobody says otherwise."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from ampwise_lint.source.nodes import Index, defaults_of


def device_defaults(index: Index) -> dict[str, str]:
    """Devices by the names of options and parameters; none where the file has several for one."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, default in _defaults(index):
        if device := _device(default):
            found[name].add(device)
    return {name: devices.pop() for name, devices in found.items() if len(devices) == 1}


def _defaults(index: Index) -> Iterator[tuple[str, ast.expr]]:
    for call in index.of(ast.Call):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("add_argument", "option"):
            yield from _of_option(call)
        match name, call.args:
            case ("get", [ast.Constant(value=str(key)), default]):
                yield key, default
            case ("getattr", [_, ast.Constant(value=str(key)), default]):
                yield key, default
            case _:
                pass
    for function in (*index.of(ast.FunctionDef), *index.of(ast.AsyncFunctionDef)):
        yield from defaults_of(function.args).items()
    for field in index.of(ast.AnnAssign):
        if isinstance(field.target, ast.Name) and field.value is not None:
            yield field.target.id, field.value


def _of_option(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """``add_argument("--device", default="cuda")``."""
    given = {each.arg: each.value for each in call.keywords}
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    names = [each for each in texts if isinstance(each, str) and each.startswith("--")]
    if "default" in given:
        yield from ((name.strip("-").replace("-", "_"), given["default"]) for name in names)


def _device(default: ast.expr) -> str:
    """The device of a text, or of a choice by what there is; empty for anything else."""
    if isinstance(default, ast.IfExp) and "is_available" in ast.unparse(default.test):
        return _device(default.body)
    text = default.value if isinstance(default, ast.Constant) else None
    return text.partition(":")[0] if isinstance(text, str) and text.startswith("cuda") else ""
