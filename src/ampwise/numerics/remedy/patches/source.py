"""A user's file as libcst reads it: places, names that imports bind, and edits to the byte."""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider

from ampwise.numerics.remedy.lines import lines_of
from ampwise.numerics.remedy.patches.unused import without_unused

N = TypeVar("N", bound=cst.CSTNode)


@dataclass(frozen=True, eq=False)
class Before:
    """A statement in front of another, in which there may be changes, too.

    Comments above that stay above both.
    """

    statement: cst.BaseStatement

    def of(self, below: cst.CSTNode) -> cst.FlattenSentinel[cst.CSTNode]:
        """Both."""
        above = self.statement.with_changes(leading_lines=getattr(below, "leading_lines", ()))
        return cst.FlattenSentinel([above, below.with_changes(leading_lines=())])


Change = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement] | Before

_BOTH_HOMES = ("log_softmax", "softmax")
"""Functions that ``torch`` has by the same name as ``torch.nn.functional``."""

UNREADABLE = (cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError)
"""What `SourceFile.of` raises for a file that cannot be changed."""


def encoding_of(data: bytes) -> str:
    """The encoding that a file declares, or that is Python's own."""
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


def code_of(node: cst.CSTNode) -> str:
    """The text of a node."""
    return cst.Module([]).code_for_node(node)


def same(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two expressions say the same, however they are laid out."""
    return _key(one) == _key(other)


def _key(node: cst.CSTNode) -> str:
    code = code_of(node).strip()
    try:
        return ast.dump(ast.parse(f"({code})", mode="eval"))
    except SyntaxError:
        return code


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` of names and attributes; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        home = dotted(node.value)
        return f"{home}.{node.attr.value}" if home else ""
    return ""


@dataclass(eq=False)
class SourceFile:
    """A file, parsed where a line is: the class, function or statement on its top level.

    Places of a whole file would take seconds, and what is outside is not changed.

    Attributes
    ----------
    data
        The whole file.
    module
        The tree of the part; nodes of it are what edits name.
    imports
        Names that import statements of the file bind, and what they stand for.
    memo
        What has been read from a node (`terms.read`).
    """

    path: Path
    data: bytes
    encoding: str
    module: cst.Module
    imports: Mapping[str, str]
    positions: Mapping[cst.CSTNode, CodeRange]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    lines_before: int
    memo: dict[cst.CSTNode, Any] = field(default_factory=dict[cst.CSTNode, Any], repr=False)

    @classmethod
    def of(cls, path: Path, data: bytes, line: int) -> SourceFile:
        """Read a file's bytes; see `UNREADABLE`."""
        encoding = encoding_of(data)
        lines = lines_of(data.decode(encoding))
        tree = ast.parse(data)
        first, last = _around(tree, line, len(lines))
        text = "".join(lines[first:last])
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        if wrapper.module.code != text or "\r" in text.replace("\r\n", ""):
            raise SyntaxError("the file cannot be written back to the byte")
        places: Mapping[cst.CSTNode, CodeRange] = wrapper.resolve(PositionProvider)
        parents: Mapping[cst.CSTNode, cst.CSTNode] = wrapper.resolve(ParentNodeProvider)
        return cls(path, data, encoding, wrapper.module, _imports(tree), places, parents, first)

    # -- places ------------------------------------------------------------------------------------

    def covers(self, node: cst.CSTNode, line: int) -> bool:
        """Whether a node has a part on a line."""
        if node not in self.positions:
            return False
        return self.start(node)[0] <= line <= self.end(node)[0]

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column where a node begins."""
        begin = self.positions[node].start
        return begin.line + self.lines_before, begin.column

    def end(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column where it ends."""
        end = self.positions[node].end
        return end.line + self.lines_before, end.column

    def up(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, from the inside."""
        while (above := self.parents.get(node)) is not None:
            node = above
            yield node

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Whether a node is another, or a part of it."""
        return node is outer or any(each is outer for each in self.up(node))

    def class_around(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class that a node stands in."""
        return next((each for each in self.up(node) if isinstance(each, cst.ClassDef)), None)

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement | None:
        """The statement that an expression stands in."""
        for each in self.up(node):
            if isinstance(each, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                return each
        return None

    def function_at(self, line: int) -> cst.FunctionDef | None:
        """The innermost function with a line."""
        found = [each for each in walk(self.module, cst.FunctionDef) if self.covers(each, line)]
        return max(found, key=self.start, default=None)

    # -- names -------------------------------------------------------------------------------------

    def full(self, node: cst.CSTNode) -> str:
        """The full name of ``F.softmax``, by the imports; empty where none is meant."""
        first, _, rest = dotted(node).partition(".")
        home = self.imports.get(first)
        return "" if home is None else f"{home}.{rest}" if rest else home

    def spelled(self, full: str) -> str:
        """How this file writes a full name; with ``torch.`` in front where nothing is imported."""
        ways = [
            f"{local}{full.removeprefix(home)}"
            for local, home in self.imports.items()
            if full.startswith(f"{home}.") or full == home
        ]
        shortest = min(ways, key=lambda each: each.count("."), default=full)
        name = full.rpartition(".")[2]
        in_torch = full.startswith("torch.nn.") and name in _BOTH_HOMES
        if in_torch and shortest.count(".") > 1 and (not ways or "torch" in self.imports.values()):
            return self.spelled(f"torch.{name}")
        return shortest

    # -- edits -------------------------------------------------------------------------------------

    def edited(self, changes: Mapping[cst.CSTNode, Change]) -> bytes:
        """The file with nodes replaced or removed; torch is imported if need be."""
        lines = lines_of(self.data.decode(self.encoding))
        after = self.lines_before + len(lines_of(self.module.code))
        part = changed(self.module, changes).code
        text = "".join([*lines[: self.lines_before], part, *lines[after:]])
        if "torch" not in self.imports.values() and _names_torch(changes.values()):
            text = with_torch(text)
        text = without_unused(self.data.decode(self.encoding), text, self.path)
        return text.encode(self.encoding)


def with_torch(text: str) -> str:
    """A file that imports torch: where isort has it, beside what it imports of that."""
    imports = [e for e in ast.parse(text).body if isinstance(e, ast.Import | ast.ImportFrom)]
    place = next((n for n, each in enumerate(imports) if _is_of_torch(each)), None)
    if place is None:
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "torch")
        return AddImportsVisitor(context).transform_module(cst.parse_module(text)).code
    while place and isinstance(imports[place], ast.ImportFrom):  # these stand below
        above = imports[place - 1]
        if isinstance(above, ast.Import) or above.end_lineno != imports[place].lineno - 1:
            break
        place -= 1
    lines = lines_of(text)
    lines.insert(imports[place].lineno - 1, "import torch\n")
    return "".join(lines)


def _is_of_torch(each: ast.Import | ast.ImportFrom) -> bool:
    names = (
        [each.module or ""] if isinstance(each, ast.ImportFrom) else [e.name for e in each.names]
    )
    return any(name.partition(".")[0] == "torch" for name in names)


def _around(tree: ast.Module, line: int, count: int) -> tuple[int, int]:
    """Lines before, and up to the end of, what stands on the top level around a line."""
    for each in tree.body:
        decorators: list[ast.expr] = getattr(each, "decorator_list", [])
        first = min(part.lineno for part in (each, *decorators))
        if first <= line <= (each.end_lineno or first):
            return first - 1, each.end_lineno or first
    return 0, count


def parts_with(data: bytes, names: Container[str]) -> Iterator[tuple[int, int]]:
    """First and last line of what stands on the top level and has attributes of such names."""
    for each in ast.parse(data).body:
        found = (node for node in ast.walk(each) if isinstance(node, ast.Attribute))
        if any(node.attr in names for node in found):
            yield each.lineno, each.end_lineno or each.lineno


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            for alias in each.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            for alias in each.names:
                found[alias.asname or alias.name] = f"{each.module}.{alias.name}"
    return found


def walk(node: cst.CSTNode, kind: type[N]) -> Iterator[N]:
    """Nodes of a kind below a node, itself included, in order."""
    if isinstance(node, kind):
        yield node
    for child in node.children:
        yield from walk(child, kind)


def changed(node: N, changes: Mapping[cst.CSTNode, Change]) -> N:
    """A node with nodes below it replaced or removed."""
    made = node.visit(_Editor(changes))
    assert isinstance(made, type(node))
    return made


def _names_torch(changes: Iterable[Change]) -> bool:
    nodes = [each for each in changes if isinstance(each, cst.CSTNode)]
    return any(name.value == "torch" for each in nodes for name in walk(each, cst.Name))


class _Editor(cst.CSTTransformer):
    """Replaces nodes, found by identity."""

    def __init__(self, changes: Mapping[cst.CSTNode, Change]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """The change of a node, if there is one."""
        change = self._changes.get(original_node, updated_node)
        return change.of(updated_node) if isinstance(change, Before) else change


def unified(before: bytes, after: bytes, name: str, encoding: str = "utf-8") -> str:
    """The unified diff that ``git apply`` takes; `name` is the path from where it is applied."""
    old, new = (lines_of(each.decode(encoding)) for each in (before, after))
    tail = "\t" if " " in name else ""
    lines = difflib.unified_diff(old, new, f"a/{name}{tail}", f"b/{name}{tail}")
    return "".join(
        each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines
    )
