"""Nodes of syntax: those of a file by kind and by what they stand in, and where they stand."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from typing import TypeVar, cast

N = TypeVar("N", bound=ast.AST)

Node = ast.expr | ast.stmt
"""What a mistake can be reported at, and what events and values remember of the code."""


class Index:
    """All nodes of a file, from one walk."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[int, ast.AST] = {}
        """The node around each node, by ``id``."""
        self._kinds: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # grows on the way: level by level, as `ast.walk` goes
            kind = type(node)
            self._kinds[kind].append(node)
            for name in _fields(kind):
                value: object = getattr(node, name, None)
                # In one place, without calls: this runs for each node of each file.
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST):
                        self.parents[id(child)] = node
                        nodes.append(child)

    def of(self, kind: type[N]) -> list[N]:
        """Nodes of one kind, those further out first."""
        return cast("list[N]", self._kinds.get(kind, []))


@cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Fields that nodes may stand in; contexts and operators are the same node in every place."""
    return tuple(each for each in kind._fields if each not in ("ctx", "op", "ops"))


def lines_of(node: Node | ast.keyword) -> tuple[int, int]:
    """First and last line of a node."""
    return node.lineno, node.end_lineno or node.lineno


def span(node: Node | ast.keyword) -> tuple[int, int, int, int]:
    """Line, column (from 0, in bytes), end line, end column of a node."""
    first, last = lines_of(node)
    return first, node.col_offset, last, node.end_col_offset or node.col_offset


def defaults_of(spec: ast.arguments) -> dict[str, ast.expr]:
    """What parameters are where a call does not say."""
    names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    found = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
    for parameter, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if default is not None:
            found[parameter.arg] = default
    return found
