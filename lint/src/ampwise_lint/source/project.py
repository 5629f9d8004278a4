"""The files that are read together, and how they import one another."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ampwise_lint.source.attributes import Assigned, assigned
from ampwise_lint.source.defaults import device_defaults, flags_on, set_by_signals, text_defaults
from ampwise_lint.source.imports import Imports, imports
from ampwise_lint.source.nodes import Index, Node, span
from ampwise_lint.source.outline import Outline, imported
from ampwise_lint.source.requirements import Requirements
from ampwise_lint.source.roles import Roles
from ampwise_lint.source.text import Source, UnreadableError, read, read_text


@dataclass(eq=False)
class Module:
    """A file of the project."""

    source: Source
    project: Project
    used: set[Path] = field(default_factory=set[Path])
    """Files that were read to understand this one."""
    _bound: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    _counted: dict[int, list[ast.Attribute]] = field(default_factory=dict[int, list[ast.Attribute]])
    _assigned: dict[int, Assigned] = field(default_factory=dict[int, Assigned])
    _texts: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.source.path

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return self.source.tree

    @cached_property
    def index(self) -> Index:
        """Its nodes, by kind."""
        return Index(self.tree)

    @cached_property
    def roles(self) -> Roles:
        """What names are by the way they are used."""
        return Roles(self.index)

    @cached_property
    def imports(self) -> Imports:
        """What it imports."""
        return imports(self.index)

    @cached_property
    def device_defaults(self) -> dict[str, str]:
        """Devices that its options and parameters are by default."""
        return device_defaults(self.index)

    @cached_property
    def text_defaults(self) -> dict[str, str]:
        """Texts that its options and parameters are by default."""
        return text_defaults(self.index)

    @cached_property
    def flags_on(self) -> frozenset[str]:
        """Names of options and parameters that are True by default."""
        return flags_on(self.index)

    @cached_property
    def set_by_signals(self) -> frozenset[str]:
        """Names at its top that a handler of signals sets, whenever one comes."""
        return set_by_signals(self.index)

    @cached_property
    def keeping_gradients(self) -> frozenset[int]:
        """``id`` of the functions, and other nodes, with a ``model.no_sync`` in them."""
        asked = [each for each in self.index.of(ast.Attribute) if each.attr == "no_sync"]
        return frozenset(around for each in asked for around in self.around(each))

    def around(self, node: ast.AST) -> Iterator[int]:
        """``id`` of all that a node stands in."""
        while (above := self.parents.get(id(node))) is not None:
            node = above
            yield id(node)

    @property
    def parents(self) -> dict[int, ast.AST]:
        """The node around each node, by ``id``."""
        return self.index.parents

    def holds(self, node: ast.AST) -> bool:
        """Whether a node is one of this file."""
        return id(node) in self.parents

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement a node stands in."""
        while not isinstance(node, ast.stmt):
            node = self.parents[id(node)]
        return node

    def assigned_in(self, class_: ast.ClassDef) -> Assigned:
        """How a class of this file sets attributes of its objects."""
        if id(class_) not in self._assigned:
            self._assigned[id(class_)] = assigned(class_)
        return self._assigned[id(class_)]

    def bound_in_loop(self, loop: ast.stmt, body: list[ast.stmt]) -> set[str]:
        """Names that a loop's body binds."""
        if id(loop) not in self._bound:
            self._bound[id(loop)] = {
                node.id
                for statement in body
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
        return self._bound[id(loop)]

    def counted_in_loop(self, loop: ast.stmt, body: list[ast.stmt]) -> list[ast.Attribute]:
        """Attributes that a loop's body adds to: ``self.step += 1``."""
        if id(loop) not in self._counted:
            self._counted[id(loop)] = [
                node.target
                for statement in body
                for node in ast.walk(statement)
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
            ]
        return self._counted[id(loop)]

    def unparsed(self, node: ast.AST) -> str:
        """A node as normalised text."""
        if id(node) not in self._texts:
            self._texts[id(node)] = ast.unparse(node)
        return self._texts[id(node)]

    def text_of(self, node: Node | ast.keyword) -> str:
        """A node as it stands in the file."""
        first, column, last, end = span(node)
        if first == last:  # without Python's walk over every letter of the file
            return self.source.lines[first - 1].encode()[column:end].decode()
        return ast.get_source_segment(self.source.text, node) or ast.unparse(node)


ADDED = re.compile(r"""sys\.path\.(?:append|insert)\([^\n"']*["'](?:\./)?([\w./-]*\w)/?["']""")


class Project:
    """Files that may import one another; only those that were given are ever read."""

    def __init__(self, files: frozenset[Path]) -> None:
        self.files = files
        self._modules: dict[Path, Module | UnreadableError] = {}
        self.outlines: dict[Path, Outline] = {}
        """What the prefilter saw of files."""
        self.requirements = Requirements()
        """The versions of torch that are asked for."""
        self._texts: dict[Path, str] | None = None
        self._importers: dict[Path, list[Path]] | None = None
        self._located: dict[tuple[Path, str, int], Path | None] = {}
        self._added: dict[Path, list[str]] = {}

    def module(self, path: Path) -> Module:
        """A file of the project, read once.

        Raises
        ------
        UnreadableError
            With the reason, in words.
        """
        if path not in self._modules:
            try:
                self._modules[path] = Module(read(path), self)
            except UnreadableError as error:
                self._modules[path] = error
        found = self._modules[path]
        if isinstance(found, UnreadableError):
            raise found
        return found

    def add(self, source: Source) -> Module:
        """Take in a file that is read already."""
        self._modules[source.path] = module = Module(source, self)
        return module

    def locate(self, by: Path, name: str, level: int = 0) -> Path | None:
        """The file that ``import name`` in the file `by` means, if it was given.

        As Python would find it with the importing file's folder, or one above it, on its path.
        torch is what the rules know by name, even where it is what is checked.
        """
        key = (by, name, level)  # every path through a file asks again
        if key not in self._located:
            found = self._locate(by.parent, name, level)
            found = found or self._locate_added(by, name, level)
            self._located[key] = found or self._locate_aside(by, name, level)
        return self._located[key]

    def _locate_aside(self, by: Path, name: str, level: int) -> Path | None:
        """A file in a folder aside, such as ``lib`` or ``src``, that only an installation or
        another file puts on Python's path: where the project has no other of its name.
        """
        first, *others = name.split(".")
        if level or not first or first == "torch" or first in sys.stdlib_module_names:
            return None
        found = [(each, self._at(each, tuple(others))) for each in self._folders.get(first, ())]
        for above in by.parents:
            near = {file for folder, file in found if file is not None and above in folder.parents}
            if near:
                return near.pop() if len(near) == 1 else None
        return None

    @cached_property
    def _folders(self) -> dict[str, list[Path]]:
        """Folders with files that are part of no package, by name."""
        packages = {each.parent for each in self.files if each.name == "__init__.py"}
        found: dict[str, list[Path]] = {}
        for each in {above for file in self.files for above in file.parents}:
            if each.parent not in packages:
                found.setdefault(each.name, []).append(each)
        return found

    def _locate_added(self, by: Path, name: str, level: int) -> Path | None:
        """A file in a folder that the importing file puts on Python's path."""
        parts = tuple(name.split("."))
        if level or not name or parts[0] == "torch" or not (added := self._added_by(by)):
            return None
        bases = (base / each for each in added for base in (by.parent, *by.parent.parents))
        return next((found for base in bases if (found := self._at(base, parts))), None)

    def _added_by(self, by: Path) -> list[str]:
        """The folders of ``sys.path.append("core")``, as they are written."""
        if by not in self._added:
            try:
                text = read_text(by).text
            except UnreadableError:
                text = ""
            self._added[by] = ADDED.findall(text) if "sys.path" in text else []
        return self._added[by]

    def made_beside(self, module: Module, classes: re.Pattern[str]) -> bool:
        """Whether a file that imports a module makes something of a class that the pattern finds.

        By the texts of all files, for a question that is rarely asked.
        """
        texts = self._all_texts()
        module.used.update(texts)
        found = {match[1] for text in texts.values() for match in classes.finditer(text)}
        if not found:
            return False
        makes = re.compile(rf"\b({'|'.join(found)})\(")
        imports = _importing(module.path)
        return any(
            path != module.path and imports.search(text) and makes.search(text)
            for path, text in texts.items()
        )

    def leading_to(self, module: Module, word: str) -> Iterator[Module]:
        """Files with a word in them that lead to a module: by what they import, and what that does.

        By the texts of all files, for a question that is rarely asked.
        """
        texts = self._all_texts()
        module.used.update(texts)
        if self._importers is None:
            self._importers = {}
            for path, text in texts.items():
                for each in {self.locate(path, *name) for name in imported(text)} - {None, path}:
                    assert each is not None
                    self._importers.setdefault(each, []).append(path)
        waiting, known = [module.path], {module.path}
        while waiting:
            found = {*self._importers.get(waiting.pop(), ())} - known
            known |= found
            waiting += sorted(found)
        for path in sorted(known):
            if word in texts[path]:
                try:
                    yield self.module(path)
                except UnreadableError:  # said when that file is checked itself
                    continue

    def leaves_unused(self, module: Module, function: str) -> bool:
        """Whether files import a module, and none of them nor itself uses a function of it.

        Files that hand on what they import may be anybody's.
        """
        texts = self._all_texts()
        module.used.update(texts)
        imports = _importing(module.path)
        users = {e for e, text in texts.items() if imports.search(text)} - {module.path}
        stars = re.compile(rf"\b{module.path.stem} import \*")
        if not users or any(e.name == "__init__.py" or stars.search(texts[e]) for e in users):
            return False
        try:
            return not any(_uses(self.module(each), function) for each in {*users, module.path})
        except UnreadableError:
            return False

    def sets(self, module: Module, attribute: str) -> bool:
        """Whether any file sets an attribute of a name, of whatever object, by its text."""
        texts = self._all_texts()
        module.used.update(texts)
        name = re.escape(attribute)
        sets = re.compile(
            rf"\.{name}\b[^=\n]*=(?!=)|^[ \t]+{name}[ \t]*[:=]|[\"']{name}[\"']", re.MULTILINE
        )
        return any(sets.search(text) for text in texts.values())

    def _all_texts(self) -> dict[Path, str]:
        if self._texts is None:
            self._texts = {}
            for path in sorted(self.files):
                try:
                    self._texts[path] = read_text(path).text
                except UnreadableError:
                    continue
        return self._texts

    def _locate(self, folder: Path, name: str, level: int) -> Path | None:
        parts = tuple(name.split(".")) if name else ()
        if level:
            for _ in range(level - 1):
                folder = folder.parent
            return self._at(folder, parts)
        if not parts or parts[0] == "torch":
            return None
        return next(
            (found for base in (folder, *folder.parents) if (found := self._at(base, parts))), None
        )

    def _at(self, folder: Path, parts: tuple[str, ...]) -> Path | None:
        base = folder.joinpath(*parts)
        candidates = [base / "__init__.py"]
        if parts:
            candidates.insert(0, base.with_name(base.name + ".py"))
        return next((each for each in candidates if each in self.files), None)


def _importing(path: Path) -> re.Pattern[str]:
    """How a file's text imports another one."""
    return re.compile(rf"import\b[^\n]*\b{path.stem}\b|\b{path.stem} import")


def _uses(module: Module, name: str) -> bool:
    """Whether a file reads a name, also as an attribute."""
    named = any(isinstance(e, ast.Name) and e.id == name for e in module.index.of(ast.Name))
    return named or any(
        isinstance(e, ast.Attribute) and e.attr == name for e in module.index.of(ast.Attribute)
    )
