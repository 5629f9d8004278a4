"""Where one path through the code stands, and what has happened on it.

Whatever evaluates code or says what torch does is handed a `State`: it tells the place, writes
events down, and leads back to the interpreter. Expressions hold calls, calls walk functions,
functions hold expressions: that circle closes here, through `Handlers`, and nowhere in the imports.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ampwise_lint.path.oracle import Oracle
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.project import Module
from ampwise_lint.values.abstract import (
    Function,
    Imported,
    Manager,
    Origin,
    Region,
    Scope,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import Condition, Context, Enter, Event, Loop, Site

Flow = Literal["", "break", "continue", "return", "raise"]
"""How a statement leaves its block; empty where it does not."""


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


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the parts of the interpreter do for one another."""

    expressions: Mapping[type[ast.expr], Callable[[State, Any], Value]]
    """The value of an expression, by its kind."""
    statements: Mapping[type[ast.stmt], Callable[[State, Any], Flow | None]]
    """What a statement does, by its kind."""
    call: Callable[[State, Function, Arguments, Node], Value]
    """Walk a function of the project where it is called."""
    assign: Callable[[State, ast.expr, Value], None]
    """Bind a target."""
    resolve: Callable[[State, Imported], Value]
    """Look into the file a name was imported from."""


class State:
    """One path through the code of a module."""

    def __init__(
        self,
        module: Module,
        oracle: Oracle,
        budget: Budget,
        imported: dict[int, Scope],
        handlers: Handlers,
    ) -> None:
        self.module = module
        self.oracle = oracle
        self.budget = budget
        self.imported = imported
        """Scopes of files that are not run but looked into, the same for all paths."""
        self.importing: list[Path] = []
        self.trace: list[Event] = []
        self.walked: set[int] = set()
        """``id`` of the functions that were walked."""
        self.named: set[int] = set()
        """``id`` of the functions that were taken by their names: called, or handed on."""
        self.frames: list[Frame] = []
        self.unsure = 0
        """Inside a branch that is walked although it may not be taken."""
        self.converted: dict[str, Value] = {}
        self.modes: dict[str, bool] = {}
        """Whether networks train, by key, of those that were told to train or to evaluate."""
        self.called: set[int] = set()
        """``id`` of expressions that are called: an attribute there is a method."""
        self.prepared: dict[str, Region] = {}
        """Networks that run in autocast wherever they are called, by key."""
        self.trainer: Wrapper | None = None
        """The trainer that calls the steps that are being walked."""
        self.in_forward = 0
        """How many networks' forward is being walked."""
        self.trains: bool | None = None
        """Whether the network whose forward is being walked trains; None outside of any."""
        self._handlers = handlers
        self._quiet = 0
        self._context: Context | None = Context()
        self._loops: tuple[Loop, ...] = ()
        self._conditions: tuple[Condition, ...] = ()
        self._regions: tuple[Region, ...] = ()
        self._no_grad = False
        self._serial = 0
        self._made: Counter[str] = Counter()

    # ------------------------------------------------------------------ where the path stands

    @property
    def context(self) -> Context:
        """The place, as events keep it."""
        if self._context is None:
            names: tuple[str, ...] = ()
            sites: list[Site] = []
            for around, frame in itertools.pairwise(self.frames):
                if frame.call is not None:
                    sites.append(Site(frame.call, around.scope.module, names))
                if frame.function is not None:
                    names = (*names, frame.function.name)
            self._context = Context(
                self._loops, self._conditions, self._regions, self._no_grad, names, tuple(sites)
            )
        return self._context

    @property
    def scope(self) -> Scope:
        """Names in reach."""
        return self.frames[-1].scope

    @property
    def here(self) -> Module:
        """The file whose code is being walked."""
        return self.scope.module

    @property
    def iteration(self) -> int | None:
        """Serial number of the innermost loop's iteration."""
        return self._loops[-1].serial if self._loops else None

    @property
    def micro_batch(self) -> int:
        """Where in the window of the innermost loop: 0, or 1 for the last; 0 outside loops."""
        return self._loops[-1].iteration if self._loops else 0

    @property
    def region(self) -> Region | None:
        """The autocast region in force, if one is on."""
        return self._regions[-1] if self._regions and self._regions[-1].enabled else None

    def is_evaluating(self, network: Value) -> bool:
        """Whether a network was put into evaluation mode."""
        return self.modes.get(key_of(network)) is False

    def unknown(self, node: Node, made: Origin = "computed", label: str = "") -> Unknown:
        """A value that is not known, and the same again at the same place of the same iteration."""
        place = f"{self.here.path.name}:{node.lineno}:{node.col_offset}"
        key = f"{label or type(node).__name__}@{place}"
        if self._loops:
            key += f"#{self._loops[-1].serial}"
        return Unknown(key, made, loop=self.iteration)

    def made_here(self, node: Node, what: str) -> str:
        """A key for what this line makes in this iteration."""
        return f"{what}@{self.here.path.name}:{node.lineno}#{self.iteration}"

    def nth_made(self, node: Node, name: str) -> str:
        """A key for what is made here: that of the same object on every path."""
        place = f"{name}@{self.here.path.name}:{node.lineno}:{node.col_offset}"
        self._made[place] += 1
        return f"{place}/{self._made[place]}"

    # ------------------------------------------------------------------ what happens

    @property
    def is_silent(self) -> bool:
        """Whether nothing is written down."""
        return self._quiet > 0

    def emit(
        self, kind: Callable[..., Event], node: Node, *values: object, **named: object
    ) -> None:
        """Write an event down."""
        if not self._quiet:
            self.trace.append(kind(node, self.here, self.context, *values, **named))

    @contextmanager
    def silent(self) -> Generator[None]:
        """Write nothing down meanwhile."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # ------------------------------------------------------------------ back to the interpreter

    def evaluate(self, node: ast.expr, *, quiet: bool = False) -> Value:
        """The value of an expression; `quiet`: without writing down what happens."""
        if quiet:
            with self.silent():
                return self.evaluate(node)
        self.budget.spend()
        handler = self._handlers.expressions.get(type(node))
        return handler(self, node) if handler is not None else self.unknown(node)

    def execute(self, body: Iterable[ast.stmt]) -> Flow:
        """Walk statements until one leaves the block."""
        for statement in body:
            self.budget.spend()
            handler = self._handlers.statements.get(type(statement))
            if handler is not None and (flow := handler(self, statement)):
                return flow
        return ""

    def call(self, function: Function, arguments: Arguments, node: Node) -> Value:
        """Walk a function of the project where it is called; what it returns."""
        return self._handlers.call(self, function, arguments, node)

    def assign(self, target: ast.expr, value: Value) -> None:
        """Assign to a target."""
        self._handlers.assign(self, target, value)

    def resolve(self, value: Imported) -> Value:
        """Look into the file a name was imported from."""
        return self._handlers.resolve(self, value)

    # ------------------------------------------------------------------ going in and out

    @contextmanager
    def in_frame(self, frame: Frame) -> Generator[None]:
        """Stand in a function, class or module."""
        self.frames.append(frame)
        self._context = None
        try:
            yield
        finally:
            self.frames.pop()
            self._context = None

    @contextmanager
    def in_iteration(self, node: Node, iteration: int, *, over_data: bool) -> Generator[None]:
        """Stand in one iteration of a loop."""
        before = self._loops
        self._serial += 1
        loop = Loop(node, iteration, self._serial, over_data, len(self._conditions))
        self._loops = (*before, loop)
        self._context = None
        try:
            yield
        finally:
            self._loops, self._context = before, None

    @contextmanager
    def in_branch(
        self, node: Node, test: Value, *, taken: bool, periodic: bool, known: bool
    ) -> Generator[None]:
        """Stand in a branch of a condition."""
        before = self._conditions
        self._conditions = (*before, Condition(node, key_of(test), taken, periodic, known))
        self._context = None
        try:
            yield
        finally:
            self._conditions, self._context = before, None

    @contextmanager
    def perhaps(self) -> Generator[None]:
        """Stand in code that may not run."""
        self.unsure += 1
        try:
            yield
        finally:
            self.unsure -= 1

    @contextmanager
    def inside(self, managers: Iterable[Manager]) -> Generator[None]:
        """Hold context managers open."""
        before = (self._regions, self._no_grad)
        for each in managers:
            self._enter(each)
        self._context = None
        try:
            yield
        finally:
            self._regions, self._no_grad = before
            self._context = None

    @contextmanager
    def in_region(self, region: Region) -> Generator[None]:
        """Run a network that opens autocast itself."""
        before = self._regions
        self._regions, self._context = (*before, region), None
        try:
            yield
        finally:
            self._regions, self._context = before, None

    @contextmanager
    def in_network(self, network: Value) -> Generator[None]:
        """Walk a network's forward; those it calls train if it does."""
        before = self.trains
        if before is None:
            self.trains = not self.is_evaluating(network)
        self.in_forward += 1
        try:
            yield
        finally:
            self.in_forward -= 1
            self.trains = before

    def keep(self, manager: Manager) -> None:
        """Go on as in a context manager that nobody leaves yet: ``set_grad_enabled(False)``."""
        self._enter(manager)
        self._context = None

    def leave(self, manager: Manager) -> None:
        """Go on as behind a context manager that was entered by `keep`."""
        if manager.region is not None:
            self._regions = tuple(e for e in self._regions if e.node is not manager.region.node)
        elif manager.kind == "no_grad":
            self._no_grad = False
        self._context = None

    def _enter(self, manager: Manager) -> None:
        match manager.kind:
            case "autocast":
                assert manager.region is not None
                self._regions = (*self._regions, manager.region)
                self._context = None
                if manager.region.enabled and not self._quiet:
                    region = manager.region  # it may be made in another file than it is entered in
                    self.trace.append(Enter(region.node, region.module, self.context, region))
            case "no_grad":
                self._no_grad = True
            case "enable_grad":
                self._no_grad = False
            case "many":
                for each in manager.managers:
                    self._enter(each)
            case _:
                pass
