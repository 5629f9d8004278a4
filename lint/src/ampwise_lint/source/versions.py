"""Code that is there for other versions of a library: what it names has to stay as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.source.places import block_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted

MISSING = ("ImportError", "ModuleNotFoundError", "AttributeError")
"""What a library of another version raises."""

ASKS = re.compile(
    r"version|hasattr\(|\b_?TORCH_?(GE|GREATER|LT|\d)|_torch_(at_least|ge|gt|lt)|native_amp"
    r"|is_torch_|find_spec",
    re.IGNORECASE,
)
"""A condition that asks which version there is."""


def is_for_versions(module: Module, node: ast.AST) -> bool:
    """Whether a node stands in a branch for some versions: behind a failed import, or a check."""
    return next(_checks(module, node), None) is not None


def has_newer(module: Module, node: ast.AST, new: re.Pattern[str]) -> bool:
    """Whether a node is in a branch for some versions, beside one for others with a new name."""
    return any(new.search(module.unparsed(each)) for each in _checks(module, node))


def _checks(module: Module, node: ast.AST) -> Iterator[ast.AST]:
    """The checks for a version, and the attempts to import, that decide whether a node runs."""
    around = module.parents.get(id(node))
    while around is not None:
        if isinstance(around, ast.Try) and _falls_back(around, node):
            yield around
        if isinstance(around, ast.If | ast.IfExp) and ASKS.search(module.unparsed(around.test)):
            yield around
        if isinstance(node, ast.stmt):
            yield from _left_for_others(module, node)
        node, around = around, module.parents.get(id(around))


def _falls_back(statement: ast.Try, inner: ast.AST) -> bool:
    """Whether a ``try`` is about what is missing, and something stands in it or in a handler."""
    if not any(inner is each for each in (*statement.body, *statement.handlers)):
        return False
    simple = all(isinstance(e, ast.Import | ast.ImportFrom | ast.Assign) for e in statement.body)
    # What takes no such argument yet raises TypeError, where nothing but the call is tried.
    called = len(statement.body) == 1 and isinstance(statement.body[0], ast.Return | ast.Assign)
    names = (*MISSING, "TypeError") if called else MISSING
    return any(simple or _catches(each, names) for each in statement.handlers)


def _catches(handler: ast.ExceptHandler, names: tuple[str, ...]) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is not None and dotted(each) in names for each in caught)


def _left_for_others(module: Module, statement: ast.stmt) -> Iterator[ast.If]:
    """Earlier checks of the version, in the same block, that left for the other versions."""
    block = block_of(module, statement)
    for each in block[: block.index(statement)]:
        leaves = isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return | ast.Raise)
        if isinstance(each, ast.If) and leaves and ASKS.search(module.unparsed(each.test)):
            yield each
