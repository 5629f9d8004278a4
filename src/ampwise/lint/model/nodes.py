"""Nodes of syntax that stand somewhere in a file, and where."""

from __future__ import annotations

import ast

Node = ast.expr | ast.stmt
"""What a mistake can be reported at, and what events and values remember of the code."""


def lines_of(node: Node) -> tuple[int, int]:
    """First and last line of a node."""
    return node.lineno, node.end_lineno or node.lineno


def span(node: Node) -> tuple[int, int, int, int]:
    """Line, column (from 0, in bytes), end line, end column of a node."""
    first, last = lines_of(node)
    return first, node.col_offset, last, node.end_col_offset or node.col_offset
