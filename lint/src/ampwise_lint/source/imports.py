"""Full names of what a file imports, and where it uses them: by its text, whatever runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampwise_lint.source.library import canonical
from ampwise_lint.source.nodes import Index
from ampwise_lint.source.roles import dotted


@dataclass(slots=True)
class Imports:
    """The import statements of a file, and the names they bind."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    """Local name -> full name."""
    statements: list[tuple[ast.Import | ast.ImportFrom, list[str]]] = field(
        default_factory=list[tuple[ast.Import | ast.ImportFrom, list[str]]]
    )
    """Each statement, with the full names it brings in."""

    def full(self, node: ast.AST) -> str:
        """The full name of ``torch.cuda.amp.autocast`` or an alias of it; empty if not imported."""
        text = dotted(node)
        first, _, rest = text.partition(".")
        home = self.names.get(first, "torch" if first == "torch" else "")
        return canonical(f"{home}.{rest}" if rest else home) if home else ""

    def uses(self, index: Index) -> Iterator[tuple[ast.Attribute | ast.Name, str]]:
        """Every use of an imported name outside the import statements, the longest path each."""
        for name in index.of(ast.Name):
            if name.id in self.names or name.id == "torch":
                longest = _path(index, name)
                yield longest, self.full(longest)


def imports(index: Index) -> Imports:
    """Read a file's import statements."""
    found = Imports()
    for node in index.of(ast.Import):
        for alias in node.names:
            local = alias.asname or alias.name.partition(".")[0]
            found.names[local] = alias.name if alias.asname else local
        found.statements.append((node, [each.name for each in node.names]))
    for node in index.of(ast.ImportFrom):
        if node.level:
            continue
        full = [canonical(f"{node.module}.{each.name}") for each in node.names]
        for alias, name in zip(node.names, full, strict=True):
            found.names[alias.asname or alias.name] = name
        found.statements.append((node, full))
    return found


def _path(index: Index, name: ast.Name) -> ast.Attribute | ast.Name:
    """The longest ``a.b["c"].d`` that starts at a name."""
    longest: ast.Attribute | ast.Name = name
    node: ast.AST = name
    while True:
        match index.parents[id(node)]:
            case ast.Attribute() as node:
                longest = node
            case ast.Subscript(value=value, slice=ast.Constant()) as outer if value is node:
                node = outer
            case _:
                return longest
