"""What options and parameters of a file are where nobody says otherwise."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from ampwise_lint.source.nodes import Index, defaults_of


def device_defaults(index: Index) -> dict[str, str]:
    """Devices by the names of options and parameters; none where the file has several for one."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, default in _defaults(index):
        if device := _device(default):
            found[name].add(device)
    return _only_ones(found)


def text_defaults(index: Index) -> dict[str, str]:
    """Texts by the names of options and parameters; none where the file has several for one."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, default in _defaults(index):
        if isinstance(default, ast.Constant) and isinstance(default.value, str):
            found[name].add(default.value)
    return _only_ones(found)


def _only_ones(found: dict[str, set[str]]) -> dict[str, str]:
    return {name: texts.pop() for name, texts in found.items() if len(texts) == 1}


NAME = re.compile(r"(?:^|[.(\[' ])([A-Za-z_]\w*)(?:'\])?\)?(?:\.type|\.split\(\).*)?$")


def setting_in(key: str) -> str:
    """The name of a setting, in the key of what was read from it; empty where there is none."""
    found = NAME.search(key)
    return found[1] if found else ""


def flags_on(index: Index) -> frozenset[str]:
    """Names of options, parameters and fields that are True, and never False, by default."""
    found: dict[str, set[object]] = defaultdict(set)
    for name, default in _defaults(index):
        if isinstance(default, ast.Constant):
            found[name].add(default.value)
    for call in index.of(ast.Call):
        if getattr(call.func, "attr", "") == "set_defaults":  # it has the last word
            for each in call.keywords:
                if each.arg is not None and isinstance(each.value, ast.Constant):
                    found[each.arg] = {each.value.value}
    return frozenset(name for name, values in found.items() if values == {True})


def set_by_signals(index: Index) -> frozenset[str]:
    """Names that a function sets which is handed to ``signal.signal``."""
    handlers = {
        handler.id
        for call in index.of(ast.Call)
        if getattr(call.func, "attr", "") == "signal"
        for handler in call.args[1:]
        if isinstance(handler, ast.Name)
    }
    return frozenset(
        name
        for function in (index.of(ast.FunctionDef) if handlers else ())
        if function.name in handlers
        for each in ast.walk(function)
        if isinstance(each, ast.Global)
        for name in each.names
    )


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
    match given.get("dest"):
        case ast.Constant(value=str(dest)):
            names = [dest]
        case _:
            pass
    default = given.get("default")
    if default is None and "action" in given:
        default = STORED.get(ast.unparse(given["action"]))
    if default is not None:
        yield from ((name.strip("-").replace("-", "_"), default) for name in names)


STORED = {"'store_true'": ast.Constant(False), "'store_false'": ast.Constant(True)}
"""What an option is by default that takes no value."""


def _device(default: ast.expr) -> str:
    """The device of a text, or of a choice by what there is; empty for anything else."""
    if isinstance(default, ast.IfExp) and "is_available" in ast.unparse(default.test):
        return _device(default.body)
    text = default.value if isinstance(default, ast.Constant) else None
    return text.partition(":")[0] if isinstance(text, str) and text.startswith("cuda") else ""
