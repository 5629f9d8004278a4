"""Imports: other files of the project, looked into where a name of theirs is needed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampwise_lint.path.state import Flow, Frame, State
from ampwise_lint.source import library
from ampwise_lint.source.project import Module
from ampwise_lint.source.text import UnreadableError
from ampwise_lint.values.abstract import Const, DictValue, Imported, Ref, Scope, Value

MAX_IMPORTS = 4
"""Files that import files that are followed."""


def _import(state: State, node: ast.Import) -> None:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        path = state.here.project.locate(state.here.path, name)
        if path is not None or not isinstance(state.scope.names.get(name), DictValue):
            value: Value = Ref(name) if path is None else Imported(path, full=name)
            state.scope.set(alias.asname or name, value)
        if alias.asname is None:
            _import_parts(state, node, alias.name.split("."))


def _import_parts(state: State, node: ast.Import, parts: list[str]) -> None:
    """``import a.b`` makes ``b`` an attribute of ``a``, also where that is a mere folder."""
    fulls = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    paths = [state.here.project.locate(state.here.path, each) for each in fulls]
    names = state.scope.names
    for count, (part, full, path) in enumerate(zip(parts, fulls, paths, strict=True)):
        if path is None and not any(paths[count:]):
            return
        if path is None and not isinstance(names.get(part), DictValue):
            names[part] = DictValue({}, node, open=True)
        elif path is not None and count:
            names.setdefault(part, Imported(path, full=full))
        if part is parts[-1] or path == state.here.path:
            continue
        package = names[part] if path is None else resolve(state, Imported(path, full=full))
        if not isinstance(package, DictValue):
            return
        names = package.items


def _import_from(state: State, node: ast.ImportFrom) -> None:
    source = state.here.project.locate(state.here.path, node.module or "", node.level)
    for alias in node.names:
        if alias.name == "*":
            _import_star(state, node, source)
            continue
        full = library.canonical(f"{'.' * node.level}{node.module or ''}.{alias.name}")
        inner = f"{node.module}.{alias.name}" if node.module else alias.name
        module = state.here.project.locate(state.here.path, inner, node.level)
        value: Value = Ref(full)
        if source is not None and source != state.here.path:
            value = Imported(source, alias.name, full)
        is_part = module is not None and (source is None or source.name == "__init__.py")
        if is_part and not (source and _is_bound_in(state, source, alias.name)):
            assert module is not None
            value = Imported(module, full=full)
        state.scope.set(alias.asname or alias.name, value)


def _is_bound_in(state: State, package: Path, name: str) -> bool:
    """Whether a package binds a name that one of its files has, too: ``from .build import build``.

    Where the package is being looked into, that name may not be bound yet.
    """
    if package == state.here.path or package in state.importing:
        return False
    try:
        body = state.here.project.module(package).tree.body
    except UnreadableError:  # said when that file is checked itself
        return False
    return any(
        isinstance(each, ast.ImportFrom)
        and each.module
        and any((part.asname or part.name) == name for part in each.names)
        for each in body
    )


def _import_star(state: State, node: ast.ImportFrom, source: Path | None) -> None:
    if source is not None and source != state.here.path:
        found = resolve(state, Imported(source, full=node.module or ""))
        if isinstance(found, DictValue):
            for name, value in found.items.items():
                if not name.startswith("_"):
                    state.scope.set(name, value)
        return
    module = node.module or ""
    if module in ("torch.cuda.amp", "torch.amp", "torch.cpu.amp"):
        for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd"):
            state.scope.set(name, Ref(f"{module}.{name}"))


def resolve(state: State, value: Imported) -> Value:
    """Look into the file a name was imported from."""
    is_circle = value.path in state.importing
    if is_circle or len(state.importing) > MAX_IMPORTS:
        return Ref(value.full)
    try:
        module = state.here.project.module(value.path)
    except UnreadableError:  # said when that file is checked itself
        return Ref(value.full)
    state.importing.append(value.path)
    try:
        scope = run_module(state, module, main=False)
        if not value.name:
            return DictValue(scope.names, module.tree, open=True)
        found = scope.names.get(value.name)
        if isinstance(found, Imported):
            found = resolve(state, found)
    finally:
        state.importing.pop()
    return Ref(value.full) if found is None else found


def run_module(state: State, module: Module, *, main: bool) -> Scope:
    """Walk the body of a file; `main`: as a script."""
    state.module.used.add(module.path)
    if not main and id(module) in state.imported:
        return state.imported[id(module)]
    scope = Scope(module)
    if not main:
        state.imported[id(module)] = scope
    scope.names["__name__"] = Const("__main__" if main else module.path.stem)
    with state.in_frame(Frame(None, scope)):
        if main:
            state.execute(module.tree.body)
        else:
            with state.silent():
                state.execute(_definitions(module.tree.body))
    return scope


def _definitions(body: list[ast.stmt]) -> list[ast.stmt]:
    """What another file can import: definitions and bindings, not what the module does."""
    kinds = (
        ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign,
        ast.AnnAssign, ast.If, ast.Try,
    )  # fmt: skip
    return [each for each in body if isinstance(each, kinds)]


STATEMENTS: dict[type[ast.stmt], Callable[[State, Any], Flow | None]] = {
    ast.Import: _import,
    ast.ImportFrom: _import_from,
}
