"""Nodes of syntax: those of a file by kind and by what they stand in, and where they stand."""

from __future__ import annotations

import ast
from collections import defaultdict
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
            self._kinds[type(node)].append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[id(child)] = node
                nodes.append(child)

    def of(self, kind: type[N]) -> list[N]:
        """Nodes of one kind, those further out first."""
        return cast("list[N]", self._kinds.get(kind, []))


def lines_of(node: Node) -> tuple[int, int]:
    """First and last line of a node."""
    return node.lineno, node.end_lineno or node.lineno


def span(node: Node) -> tuple[int, int, int, int]:
    """Line, column (from 0, in bytes), end line, end column of a node."""
    first, last = lines_of(node)
    return first, node.col_offset, last, node.end_col_offset or node.col_offset
