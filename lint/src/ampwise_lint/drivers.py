"""Methods of base classes that run what a class derived from them defines.

A trainer's base often has the loop, autocast and the scaler, and leaves the loss, the clipping or
the validation to classes in other files. What these define is walked from there. And methods that
set an object up for its steps, which whoever owns it calls before them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from ampwise_lint.source import library
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.values.abstract import Class, Function, Scope


def derived(module: Module, scope: Scope) -> Iterator[Class]:
    """Classes at the top of a file that have a base in the project."""
    for node in module.tree.body:
        value = scope.names.get(node.name) if isinstance(node, ast.ClassDef) else None
        has_base = isinstance(value, Class) and any(isinstance(e, Class) for e in value.bases)
        if isinstance(value, Class) and has_base and value.node is node:
            yield value


def drivers(class_: Class) -> list[Function]:
    """Inherited methods that lead to part of a step, through methods the class itself defines.

    Those that no other one calls go first.
    """
    inherited = _inherited(class_)
    calls = {name: _own_calls(each.node) for name, each in inherited.items()}
    steps = {name for name, each in class_.attributes.items() if _is_core(each)}
    reached: set[str] = set()
    waiting = list(class_.attributes)
    while waiting:
        name = waiting.pop()
        callers = {each for each, called in calls.items() if name in called} - reached
        reached |= callers
        waiting += callers
    found = {e for e in reached if _is_core(inherited[e]) or calls[e] & steps}
    # A loop that calls what makes the steps is part of them.
    while more := {name for name in reached - found if calls[name] & found}:
        found |= more
    inner = {each for name in found for each in calls[name] if each != name}
    return [inherited[name] for name in sorted(found, key=lambda each: (each in inner, each))]


def setups(class_: Class, before: str) -> dict[str, set[str]]:
    """Methods that set part of a step, and what of it, other than those `before` runs or is run by.

    Methods that make steps themselves are none.
    """
    found: dict[str, set[str]] = {}
    own = _reached(class_, before)
    for each in reversed([*class_.lineage()]):
        for name, attributes in each.module.assigned_in(each.node).by_method.items():
            sets = {attr for attr in attributes if _is_of_step(each, attr)}
            if sets and name not in own:
                reached = _reached(class_, name)
                if before not in reached and not any(map(_steps, reached.values())):
                    found[name] = sets
    return found


def _is_of_step(class_: Class, attr: str) -> bool:
    """Whether an attribute is a scaler, an optimizer or a schedule, by its use or what makes it."""
    module = class_.module
    if module.roles.of(f"self.{attr}") in ("scaler", "optimizer", "scheduler"):
        return True
    made = module.assigned_in(class_.node).made.get(attr)
    full = module.imports.full(made.func) if made is not None else ""
    return library.is_optimizer(full) or library.is_scheduler(full) or full in library.SCALERS


def _reached(class_: Class, name: str) -> dict[str, Function]:
    """A method and those of its object that it leads to."""
    found: dict[str, Function] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        value = class_.lookup(name)
        if name not in found and value is not None and isinstance(value[0], Function):
            found[name] = value[0]
            waiting += _own_calls(value[0].node)
    return found


def _steps(method: Function) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr in STEPS for each in ast.walk(method.node)
    )


STEPS = ("backward", "step")


def may_derive(module: Module) -> bool:
    """Whether a file may have classes whose base is in the project, by what is written there."""
    return any(
        isinstance(node, ast.ClassDef) and any(_may_be_ours(module, each) for each in node.bases)
        for node in module.tree.body
    )


def _may_be_ours(module: Module, base: ast.expr) -> bool:
    name = dotted(base)
    full = module.imports.full(base)
    return bool(name) and not full.startswith(OUTSIDE) and not hasattr(builtins, name)


OUTSIDE = ("torch.", "typing.", "abc.", "enum.", "collections.", "pytorch_lightning.", "lightning.")
"""Where bases come from that are in no project."""


def _inherited(class_: Class) -> dict[str, Function]:
    """Methods that the bases in the project define and the class does not."""
    found: dict[str, Function] = {}
    waiting, seen = list(class_.bases), {id(class_)}
    while waiting:
        base = waiting.pop(0)
        if not isinstance(base, Class) or id(base) in seen:
            continue
        seen.add(id(base))
        waiting += base.bases
        for name, value in base.attributes.items():
            if isinstance(value, Function) and name not in class_.attributes:
                found.setdefault(name, value)
    found.pop("__init__", None)
    return found


def _own_calls(node: ast.AST) -> set[str]:
    """Names of the methods of its own object that a method calls."""
    return {
        each.func.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and isinstance(each.func.value, ast.Name)
        and each.func.value.id == "self"
    }


def _is_core(value: object) -> bool:
    return isinstance(value, Function) and id(value.node) in value.module.roles.core
