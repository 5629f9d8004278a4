"""Names and what they are bound to, the functions being walked, and how much more may be walked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampwise_lint.source.nodes import Node
from ampwise_lint.values.abstract import Function, Value

if TYPE_CHECKING:
    from ampwise_lint.source.project import Module


class Scope:
    """Names of a module, function or class body."""

    __slots__ = ("globals", "module", "names", "parent")

    def __init__(self, module: Module, parent: Scope | None = None) -> None:
        self.module = module
        self.parent = parent
        self.names: dict[str, Value] = {}
        self.globals: set[str] = set()

    def get(self, name: str) -> Value | None:
        """What a name stands for; None where nothing was bound to it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def set(self, name: str, value: Value) -> None:
        """Bind a name."""
        if name in self.globals:
            self.top.names[name] = value
        else:
            self.names[name] = value

    def put(self, name: str, value: Value) -> None:
        """Bind a name anew where it is bound."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                scope.names[name] = value
                return
            scope = scope.parent

    @property
    def top(self) -> Scope:
        """The module's scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


@dataclass(slots=True)
class Frame:
    """A function that is being walked."""

    function: Function | None
    scope: Scope
    call: Node | None = None
    """Where it is called."""
    returned: Value | None = None
    may_return: list[Value] = field(default_factory=list[Value])


class BudgetError(Exception):
    """The code is too large to be walked to its end."""


class Budget:
    """How many more nodes may be walked, over all paths of a file."""

    def __init__(self, nodes: int) -> None:
        self.left = nodes

    def spend(self) -> None:
        """Count one."""
        self.left -= 1
        if self.left < 0:
            raise BudgetError
