"""How the methods of a class set the attributes of its objects."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ampwise_lint.source.roles import dotted


class Assigned(NamedTuple):
    """Attributes of an object, by how its class sets them."""

    later: set[str]
    """In a method other than ``__init__``."""
    chosen: set[str]
    """In ``__init__``, to None in one case and to something in another."""
    made: dict[str, ast.Call]
    """In another method, to what a call returns."""
    by_method: dict[str, set[str]]
    """Of each other method, what it sets."""


def assigned(class_: ast.ClassDef) -> Assigned:
    """How methods set attributes of ``self``."""
    later, none, something = set[str](), set[str](), set[str]()
    made: dict[str, ast.Call] = {}
    by_method: dict[str, set[str]] = defaultdict(set)
    for method in class_.body:
        if isinstance(method, ast.FunctionDef):
            for name, value in _set_in(method):
                if method.name != "__init__":
                    later.add(name)
                    by_method[method.name].add(name)
                    if isinstance(value, ast.Call):
                        made[name] = value
                    continue
                cases = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                for each in cases:
                    is_none = isinstance(each, ast.Constant) and each.value is None
                    (none if is_none else something).add(name)
    return Assigned(later, none & something, made, by_method)


def _set_in(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Attributes of ``self`` that a method sets, with what they are set to."""
    for node in ast.walk(method):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and dotted(target.value) == "self":
                yield target.attr, getattr(node, "value", None)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            each
            for target in node.targets
            for each in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
