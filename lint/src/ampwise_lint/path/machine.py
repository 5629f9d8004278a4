"""Walks one path through code, over abstract values, and writes down what happens.

Statements are here; expressions in `expressions`, what calls do in `calls`. One `Machine` walks one
path: where a condition is not known it asks the path's oracle, but only if a branch holds part of a
training step. Other branches are walked one after the other, as if both were taken: they
can bind names, not change the order of a step.

A loop is walked twice, as a window of two micro-batches: the first time ``(i + 1) % n == 0`` does
not hold, the second time it does. Calls of functions and methods of the project are walked
where they are called; recursion and depth end that, and a budget of nodes ends everything.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ampwise_lint.interpreter import calls, expressions
from ampwise_lint.interpreter.naming import named
from ampwise_lint.path.oracle import Oracle
from ampwise_lint.path.scope import Budget, Frame, Scope
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOADER, dotted, leaves
from ampwise_lint.source.text import UnreadableError
from ampwise_lint.torch_model import functions, tensors
from ampwise_lint.values.abstract import (
    NONE,
    Class,
    Const,
    DictValue,
    Function,
    Gradient,
    Imported,
    Instance,
    ListValue,
    Loader,
    Manager,
    Model,
    Optimizer,
    Origin,
    Ref,
    Region,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    is_periodic,
    key_of,
    truth,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    Accumulate,
    Clip,
    Condition,
    Context,
    Enter,
    Event,
    GradientRead,
    Loop,
    Report,
    Site,
    ZeroGrad,
)

if TYPE_CHECKING:
    from ampwise_lint.source.project import Module

Flow = Literal["", "break", "continue", "return", "raise"]

MAX_DEPTH = 14
"""Calls inside calls that are followed."""

MAX_IMPORTS = 4
"""Files that import files that are followed."""

UNLIKELY = (
    "nan", "inf", "debug", "resume", "test_only", "eval_only", "evaluate", "dry_run", "profile",
    "no_cuda", "overfit", "isfinite", "only_test", "inference", "smoke", "compile", "ema",
)  # fmt: skip


class Machine:
    """One path through the code of a module."""

    def __init__(
        self, module: Module, oracle: Oracle, budget: Budget, imported: dict[int, Scope]
    ) -> None:
        self.module = module
        self.oracle = oracle
        self.budget = budget
        self.trace: list[Event] = []
        self.walked: set[int] = set()
        """``id`` of the functions that were walked."""
        self.frames: list[Frame] = []
        self.quiet = 0
        self.unsure = 0
        """Inside a branch that is walked although it may not be taken."""
        self._imported = imported
        """Scopes of files that are not run but looked into, the same for all paths."""
        self.converted: dict[str, Value] = {}
        self._context: Context | None = Context()
        self._loops: tuple[Loop, ...] = ()
        self._conditions: tuple[Condition, ...] = ()
        self._regions: tuple[Region, ...] = ()
        self._no_grad = False
        self._importing: list[Path] = []
        self._serial = 0
        self.evaluating: set[str] = set()
        """Networks that were put into evaluation mode, by key."""
        self.called: set[int] = set()
        """``id`` of expressions that are called: an attribute there is a method."""
        self.in_forward = 0
        """How many networks' forward is being walked."""

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
                    names = (*names, calls.name_of(frame.function))
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

    def emit(self, kind: Callable[..., Event], node: Node, *values: object) -> None:
        """Write an event down."""
        if not self.quiet:
            self.trace.append(kind(node, self.here, self.context, *values))

    def evaluate(self, node: ast.expr, *, quiet: bool = False) -> Value:
        """The value of an expression; `quiet`: without writing down what happens."""
        return expressions.evaluate(self, node, quiet=quiet)

    def attribute(self, node: ast.Attribute, owner: Value) -> Value:
        """An attribute of a value that was evaluated already."""
        self.budget.spend()
        return expressions.attribute(self, node, owner, node.attr)

    @contextmanager
    def silent(self) -> Generator[None]:
        """Write nothing down meanwhile."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def unknown(self, node: Node, made: Origin = "computed", label: str = "") -> Unknown:
        """A value that is not known, and the same again at the same place of the same iteration."""
        place = f"{self.here.path.name}:{node.lineno}:{node.col_offset}"
        key = f"{label or type(node).__name__}@{place}"
        if self._loops:
            key += f"#{self._loops[-1].serial}"
        return Unknown(key, made, loop=self.iteration)

    # ------------------------------------------------------------------ modules and functions

    def run_module(self, module: Module, *, main: bool) -> Scope:
        """Walk the body of a file; `main`: as a script."""
        self.module.used.add(module.path)
        if not main and id(module) in self._imported:
            return self._imported[id(module)]
        scope = Scope(module)
        if not main:
            self._imported[id(module)] = scope
        scope.names["__name__"] = Const("__main__" if main else module.path.stem)
        with self._frame(Frame(None, scope)):
            if main:
                self.block(module.tree.body)
            else:
                with self.silent():
                    self.block(_definitions(module.tree.body))
        return scope

    def is_evaluating(self, network: Value) -> bool:
        """Whether a network was put into evaluation mode."""
        return key_of(network) in self.evaluating

    def inside_function(self, function: Function, scope: Scope) -> AbstractContextManager[None]:
        """Evaluate in a function's scope without walking its body."""
        return self._frame(Frame(function, scope))

    def inside_module(self, scope: Scope) -> AbstractContextManager[None]:
        """Evaluate in a module's scope."""
        return self._frame(Frame(None, scope))

    @contextmanager
    def _frame(self, frame: Frame) -> Generator[None]:
        self.frames.append(frame)
        self._context = None
        try:
            yield
        finally:
            self.frames.pop()
            self._context = None

    def call(self, function: Function, arguments: Arguments, node: Node) -> Value:
        """Walk a function of the project where it is called; what it returns."""
        active = sum(
            frame.function is not None and frame.function.node is function.node
            for frame in self.frames
        )
        if active or len(self.frames) > MAX_DEPTH:
            return self.unknown(node, "called", calls.name_of(function))
        self.walked.add(id(function.node))
        scope = Scope(function.module, function.scope)
        frame = Frame(function, scope, node)
        unsure, self.unsure = self.unsure, 0
        with self._frame(frame):
            calls.bind(self, function, arguments, scope)
            if isinstance(function.node, ast.Lambda):
                self.unsure = unsure
                return self.evaluate(function.node.body)
            managers = calls.decorators(self, function)
            with self.inside(managers):
                self.block(function.node.body)
        self.unsure = unsure
        return self._returned(frame, node)

    def _returned(self, frame: Frame, node: Node) -> Value:
        """What a function returns: of optimizers that different cases return, all."""
        cases = [*frame.may_return, *([] if frame.returned is None else [frame.returned])]
        value = frame.returned
        if value is None:
            value = next((each for each in frame.may_return if each is not NONE), NONE)
        truths = {e.value for e in cases if isinstance(e, Const) and isinstance(e.value, bool)}
        if len(truths) > 1:
            return self.unknown(node, "called")
        if isinstance(value, Optimizer):
            known = {id(value), *map(id, value.others)}
            others = [e for e in cases if isinstance(e, Optimizer) and id(e) not in known]
            value.others = (*value.others, *others)
        return value

    # ------------------------------------------------------------------ conditions

    def decide(self, value: Value, default: bool = True) -> bool:
        """Whether a condition holds on this path."""
        if isinstance(value, Unknown):
            return self._decide_unknown(value, default)
        if self.is_known(value):
            return bool(truth(value))
        if isinstance(value, Scaler | Optimizer | Scheduler | Model):
            return self._ask(f"has {value.key}", True)
        key = key_of(value)
        return self._ask(key, default and not any(each in key for each in ("nan", "inf")))

    def _decide_unknown(self, value: Unknown, default: bool) -> bool:
        match value.op:
            case "not":
                return not self.decide(value.operands[0], not default)
            case "and":
                return all(self.decide(each, default) for each in value.operands)
            case "or":
                return any(self.decide(each, default) for each in value.operands)
            case "%":  # a remainder is false once in a window
                return not self._ask(f"({value.key} Eq 0)", self.micro_batch > 0)
            case "Eq":
                return self._equals(value, default)
            case _:
                return self._ask(value.key, self._default(value, default))

    def _ask(self, key: str, default: bool) -> bool:
        return self.oracle.ask(key, default, own=self.here is self.module)

    def _default(self, value: Unknown, default: bool) -> bool:
        """What holds once in a window holds on its last micro-batch."""
        return self.micro_batch > 0 if value.periodic else default

    def is_known(self, value: Value) -> bool:
        """Whether a condition can go one way only."""
        if isinstance(value, Unknown):
            match value.op:
                case "not":
                    return self.is_known(value.operands[0])
                case "and" | "or":
                    return all(map(self.is_known, value.operands))
                case _:
                    return False
        if isinstance(value, Scaler | Optimizer | Scheduler | Model) and not value.path:
            return False
        return truth(value) is not None

    def _equals(self, value: Unknown, default: bool) -> bool:
        """``x == "a"``: false where ``x == "b"`` was true."""
        left, right = value.operands
        default = self._default(value, default)
        if not isinstance(right, Const):
            return self._ask(value.key, default)
        subject = key_of(left)
        known = self.oracle.equal.get(subject)
        if known is not None and known != repr(right.value):
            return False
        holds = self._ask(value.key, default)
        if holds:
            self.oracle.equal[subject] = repr(right.value)
        return holds

    def exists(self, value: Scaler | Optimizer | Scheduler) -> None:
        """A method of it is called: it is not None on this path."""
        if not value.path:
            self.oracle.assume(f"has {value.key}")

    # ------------------------------------------------------------------ statements

    def block(self, body: Iterable[ast.stmt]) -> Flow:
        """Walk statements until one leaves the block."""
        for statement in body:
            flow = self.statement(statement)
            if flow:
                return flow
        return ""

    def statement(self, node: ast.stmt) -> Flow:
        """Walk one statement."""
        self.budget.spend()
        walk = _STATEMENTS.get(type(node))
        return (walk(self, node) or "") if walk is not None else ""

    def _expression(self, node: ast.Expr) -> Flow:
        self.evaluate(node.value)
        if isinstance(node.value, ast.Call):
            path = dotted(node.value.func)
            if path in ("exit", "quit", "sys.exit", "os._exit"):
                return "raise"
            if _sets_globals(node.value):
                self._forget_constants(node)
        return ""

    def _forget_constants(self, node: Node) -> None:
        """Settings at the top of a file that other code may have set anew are not known."""
        names = self.scope.top.names
        for name, value in names.items():
            if isinstance(value, Const) and not name.startswith("_"):
                names[name] = self.unknown(node, label=name)

    def _assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.bind(target, value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.evaluate(node.value))

    def _augmented(self, node: ast.AugAssign) -> None:
        added = self.evaluate(node.value)
        before = self.evaluate(node.target, quiet=True)
        if isinstance(before, Gradient):
            edit = node.value if isinstance(node.op, ast.Div | ast.Mult) else None
            clips = edit is not None and "clip" in ast.unparse(edit).lower()
            if clips:
                self.emit(Clip, node, before.of, True)
            else:
                self.emit(GradientRead, node, True, added)
            return
        if isinstance(node.op, ast.Add | ast.Sub):
            self._running_sum(node, before, added)
        result = expressions.binary(self, node, node.op, before, added)
        scales = isinstance(node.op, ast.Div | ast.Mult)
        if scales and isinstance(before, Tensor) and isinstance(result, Tensor) and not before.host:
            # In place: other names see it, too.
            before.divided, before.divisor = result.divided, result.divisor
        if isinstance(before, Const) and self._loops:
            result = self.unknown(node, label=dotted(node.target))
        if isinstance(result, Tensor) and isinstance(node.op, ast.Add | ast.Sub):
            result.grown, result.divided = True, False
        self.bind(node.target, result)

    def _running_sum(self, node: ast.AugAssign, before: Value, added: Value) -> None:
        is_number = isinstance(added, Tensor) and added.host
        if is_number:
            rescaled = tensors.is_rescaled(node.value)
            self.emit(Report, node, added, dotted(node.target), rescaled)
        if tensors.is_half_on_device(before) or (isinstance(added, Tensor) and not is_number):
            self.emit(Accumulate, node, before, added)

    def bind(self, target: ast.expr, value: Value) -> None:
        """Assign to a target."""
        match target:
            case ast.Name(id=name):
                before = self.scope.get(name)
                value = self._either(target, before, value)
                if not (self.unsure and _is_lost(before, value)):
                    self.scope.set(name, named(value, name))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for each, part in zip(targets, self._parts(value, targets), strict=True):
                    self.bind(each, part)
            case ast.Starred(value=inner):
                self.bind(inner, value)
            case ast.Attribute(value=owner, attr=attr):
                self._set_attribute(target, self.evaluate(owner), attr, value)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="globals")), slice=index):
                if not isinstance(index, ast.Constant):
                    self._forget_constants(target)
            case ast.Subscript(value=owner, slice=index):
                expressions.set_item(self, target, owner, index, value)
            case _:
                pass

    def _either(
        self, target: ast.Name | ast.Attribute, before: Value | None, value: Value
    ) -> Value:
        """What is bound in a branch that may not be taken: of optimizers both, of constants one."""
        if not self.unsure:
            return value
        if isinstance(before, Optimizer) and isinstance(value, Optimizer):
            value.others = (*before.others, before)
        if isinstance(before, Const) and isinstance(value, Const) and before.value != value.value:
            either = self.unknown(target, label=dotted(target))
            either.periodic = any(each.periodic for each in self._conditions)
            return either
        return value

    def _parts(self, value: Value, targets: list[ast.expr]) -> list[Value]:
        starred = any(isinstance(each, ast.Starred) for each in targets)
        match value:
            case ListValue(items=items) if len(items) == len(targets) and not starred:
                return list(items)
            case ListValue() if not starred:  # Python raises: nothing of it is known
                return [self.unknown(each, "called", dotted(each)) for each in targets]
            case Tensor():
                return [value.but(key=f"{value.key}[{i}]") for i in range(len(targets))]
            case _:
                parts: list[Value] = []
                for number, each in enumerate(targets):
                    text = dotted(each) or str(number)
                    part = expressions.item(self, value, number, text)
                    parts.append(part)
                return parts

    def _set_attribute(self, node: ast.Attribute, owner: Value, attr: str, value: Value) -> None:
        if attr == "grad":
            if value is NONE or (isinstance(value, Const) and value.value is None):
                self.emit(ZeroGrad, node, owner)
            else:
                divisor = value.divisor if isinstance(value, Gradient) else None
                self.emit(GradientRead, node, True, divisor, value)
        elif isinstance(owner, Gradient) and attr == "data":
            if isinstance(value, Gradient) and value.divisor is not None:
                self.emit(GradientRead, node, True, value.divisor)
        elif isinstance(owner, Instance):
            before = owner.attributes.get(attr)
            owner.attributes[attr] = named(self._kept(node, before, value), attr)
        elif isinstance(owner, Class):
            owner.attributes[attr] = value
        elif isinstance(owner, Tensor) and owner.data:
            self.converted[f"attribute {owner.key}.{attr}"] = value
        elif isinstance(owner, Unknown):
            key = f"{owner.key}.{attr}"
            before = self.converted.get(f"attribute {key}", Unknown(key, "given", of=owner))
            self.converted[f"attribute {key}"] = named(self._kept(node, before, value), attr)

    def _kept(self, node: ast.Attribute, before: Value | None, value: Value) -> Value:
        """What an attribute holds: of a setting and a branch's constant, either may stand."""
        if self.unsure and isinstance(before, Unknown) and isinstance(value, Const):
            return before
        return self._either(node, before, value)

    def _return(self, node: ast.Return) -> Flow:
        value = NONE if node.value is None else self.evaluate(node.value)
        if self.unsure:
            self.frames[-1].may_return.append(value)
        else:
            self.frames[-1].returned = value
        return "return"

    def _if(self, node: ast.If) -> Flow:
        test = self.evaluate(node.test)
        periodic = is_periodic([test])
        known = self.is_known(test)
        branches = node.body + node.orelse
        matters = any(id(each) in self.here.roles.steps for each in branches) or (
            periodic and any(leaves(each) for each in (node.body, node.orelse))
        )
        if known or matters:
            taken = self.decide(test, default=self._likely(node))
            with self._condition(node, test, taken, periodic, known):
                return self.block(node.body if taken else node.orelse)
        return self._both(node, test, periodic)

    def _likely(self, node: ast.If) -> bool:
        text = self.here.unparsed(node.test).lower()
        if any(each in text for each in UNLIKELY):
            return False
        return not (leaves(node.body) and not node.orelse)

    def _both(self, node: ast.If, test: Value, periodic: bool) -> Flow:
        """Walk both branches, since neither holds part of a step; the last binding stands."""
        flows: list[Flow] = []
        self.unsure += 1
        try:
            for body, taken in ((node.orelse, False), (node.body, True)):
                with self._condition(node, test, taken, periodic, known=False):
                    flows.append(self.block(body))
        finally:
            self.unsure -= 1
        if all(flows):
            frame = self.frames[-1]
            if "return" in flows and not self.unsure:
                frame.returned = next((v for v in frame.may_return if v is not NONE), NONE)
            return flows[-1]
        return ""

    @contextmanager
    def _condition(
        self, node: Node, test: Value, taken: bool, periodic: bool, known: bool
    ) -> Generator[None]:
        before = self._conditions
        self._conditions = (*before, Condition(node, key_of(test), taken, periodic, known))
        self._context = None
        try:
            yield
        finally:
            self._conditions = before
            self._context = None

    def _for(self, node: ast.For | ast.AsyncFor) -> Flow:
        over = self.evaluate(node.iter)
        return self._loop(node, node.body, node.target, over)

    def _while(self, node: ast.While) -> Flow:
        self.evaluate(node.test)
        return self._loop(node, node.body, None, None)

    def _loop(
        self, node: ast.stmt, body: list[ast.stmt], target: ast.expr | None, over: Value | None
    ) -> Flow:
        self._forget(node, body)
        over_data = _is_data(self.here, node, over)
        before, steps = self._loops, len(self.trace)
        flow: Flow = ""
        held = len(self._conditions)
        for iteration in (0, 1):
            self._serial += 1
            self._loops = (*before, Loop(node, iteration, self._serial, over_data, held))
            self._context = None
            if target is not None:
                self.bind(target, expressions.element(self, node, target, over, over_data))
            flow = self.block(body)
            if flow in ("return", "raise", "break"):
                break
            if flow != "continue" and not (self._steps_in(node, steps) or _is_phases(over)):
                break
        self._loops = before
        self._context = None
        orelse: list[ast.stmt] = getattr(node, "orelse", [])
        if flow in ("return", "raise"):
            return flow if not self.unsure else ""
        return self.block(orelse) if orelse and flow != "break" else ""

    @contextmanager
    def repeated(self, node: Node) -> Generator[None]:
        """Walk what somebody else's loop over batches calls."""
        before = self._loops
        self._serial += 1
        self._loops = (*before, Loop(node, 0, self._serial, True, len(self._conditions)))
        self._context = None
        try:
            yield
        finally:
            self._loops, self._context = before, None

    def _steps_in(self, node: ast.stmt, since: int) -> bool:
        """Whether part of a step happened in this loop itself."""
        return any(
            type(each) in calls.STEP_EVENTS
            and each.context.loops
            and each.context.loops[-1].node is node
            for each in self.trace[since:]
        )

    def _forget(self, node: ast.stmt, body: list[ast.stmt]) -> None:
        """Numbers that the loop changes are not known inside it."""
        for name in _assigned(self.here, node, body):
            before = self.scope.get(name)
            if isinstance(before, Const) and isinstance(before.value, int | float | bool):
                self.scope.set(name, self.unknown(node, label=name))

    def _with(self, node: ast.With | ast.AsyncWith) -> Flow:
        managers: list[Manager] = []
        for item in node.items:
            value = self.evaluate(item.context_expr)
            manager = value if isinstance(value, Manager) else Manager("other", item.context_expr)
            managers.append(manager)
            if item.optional_vars is not None:
                bound = manager.bound if manager.bound is not None else value
                self.bind(item.optional_vars, bound)
        with self.inside(managers):
            return self.block(node.body)

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

    def _enter(self, manager: Manager) -> None:
        match manager.kind:
            case "autocast":
                assert manager.region is not None
                self._regions = (*self._regions, manager.region)
                self._context = None
                if manager.region.enabled:
                    self.emit(Enter, manager.region.node, manager.region)
            case "no_grad":
                self._no_grad = True
            case "enable_grad":
                self._no_grad = False
            case "many":
                for each in manager.managers:
                    self._enter(each)
            case _:
                pass

    def _try(self, node: ast.Try | ast.TryStar) -> Flow:
        flow = self.block(node.body)
        if not flow:
            flow = self.block(node.orelse)
        # Handlers are for the path that fails; what they define is used when nothing else is.
        for handler in node.handlers:
            for statement in handler.body:
                self._define(statement)
        return self.block(node.finalbody) or flow

    def _define(self, node: ast.stmt) -> None:
        """Walk a definition or an import, unless its names are bound already."""
        names = _defined_names(node)
        if names and all(self.scope.get(each) is None for each in names):
            self.statement(node)

    def _match(self, node: ast.Match) -> Flow:
        self.evaluate(node.subject)
        self.unsure += 1
        try:
            for case in node.cases:
                self.block(case.body)
        finally:
            self.unsure -= 1
        return ""

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr == "grad":
                self.emit(ZeroGrad, node, self.evaluate(target.value))

    # ------------------------------------------------------------------ definitions and imports

    def _define_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.set(node.name, Function(node, self.here, self.scope))

    def _define_class(self, node: ast.ClassDef) -> None:
        bases = tuple(self.evaluate(each, quiet=True) for each in node.bases)
        class_ = Class(node, self.here, self.scope, bases)
        scope = Scope(self.here, self.scope)
        with self._frame(Frame(None, scope)), self.silent():
            self.block(node.body)
        # Methods look names up in the module, not in the class.
        for name, value in scope.names.items():
            if isinstance(value, Function) and value.scope is scope:
                value.scope, value.class_ = self.scope, class_
            class_.attributes[name] = value
        self.scope.set(node.name, class_)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            path = self.here.project.locate(self.here.path, name)
            value: Value = Ref(name) if path is None else Imported(path, full=name)
            self.scope.set(alias.asname or name, value)
            if alias.asname is None:
                self._import_parts(alias.name.split("."))

    def _import_parts(self, parts: list[str]) -> None:
        """``import a.b`` makes ``b`` an attribute of ``a``."""
        locate = self.here.project.locate
        for count in range(1, len(parts)):
            outer = locate(self.here.path, ".".join(parts[:count]))
            inner = locate(self.here.path, ".".join(parts[: count + 1]))
            if outer is None or inner is None:
                return
            value = Imported(inner, full=".".join(parts[: count + 1]))
            if outer == self.here.path:
                self.scope.names.setdefault(parts[count], value)
            elif isinstance(package := self.resolve(Imported(outer, full=parts[0])), DictValue):
                package.items.setdefault(parts[count], value)

    def _import_from(self, node: ast.ImportFrom) -> None:
        source = self.here.project.locate(self.here.path, node.module or "", node.level)
        for alias in node.names:
            if alias.name == "*":
                self._import_star(node, source)
                continue
            full = library.canonical(f"{'.' * node.level}{node.module or ''}.{alias.name}")
            inner = f"{node.module}.{alias.name}" if node.module else alias.name
            module = self.here.project.locate(self.here.path, inner, node.level)
            value: Value = Ref(full)
            if source is not None and source != self.here.path:
                value = Imported(source, alias.name, full)
            if module is not None and (source is None or source.name == "__init__.py"):
                value = Imported(module, full=full)
            self.scope.set(alias.asname or alias.name, value)

    def resolve(self, value: Imported) -> Value:
        """Look into the file a name was imported from."""
        is_circle = value.path in self._importing
        if is_circle or len(self._importing) > MAX_IMPORTS:
            return Ref(value.full)
        try:
            module = self.here.project.module(value.path)
        except UnreadableError:  # said when that file is checked itself
            return Ref(value.full)
        self._importing.append(value.path)
        try:
            scope = self.run_module(module, main=False)
            if not value.name:
                return DictValue(scope.names, module.tree, open=True)
            found = scope.names.get(value.name)
            if isinstance(found, Imported):
                found = self.resolve(found)
        finally:
            self._importing.pop()
        return Ref(value.full) if found is None else found

    def _import_star(self, node: ast.ImportFrom, source: Path | None) -> None:
        if source is not None and source != self.here.path:
            found = self.resolve(Imported(source, full=node.module or ""))
            if isinstance(found, DictValue):
                for name, value in found.items.items():
                    if not name.startswith("_"):
                        self.scope.set(name, value)
            return
        module = node.module or ""
        if module in ("torch.cuda.amp", "torch.amp", "torch.cpu.amp"):
            for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd"):
                self.scope.set(name, Ref(f"{module}.{name}"))

    def _global(self, node: ast.Global) -> None:
        self.scope.globals.update(node.names)

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            found = self.scope.get(name)
            if found is not None:
                self.scope.names[name] = found

    def _raise(self, node: ast.Raise) -> Flow:
        return "raise"

    def _break(self, node: ast.Break) -> Flow:
        return "break"

    def _continue(self, node: ast.Continue) -> Flow:
        return "continue"

    def _assert(self, node: ast.Assert) -> None:
        self.evaluate(node.test)


_STATEMENTS: dict[type[ast.stmt], Callable[[Machine, Any], Flow | None]] = {
    ast.Expr: Machine._expression,
    ast.Assign: Machine._assign,
    ast.AnnAssign: Machine._annotated,
    ast.AugAssign: Machine._augmented,
    ast.Return: Machine._return,
    ast.If: Machine._if,
    ast.For: Machine._for,
    ast.AsyncFor: Machine._for,
    ast.While: Machine._while,
    ast.With: Machine._with,
    ast.AsyncWith: Machine._with,
    ast.Try: Machine._try,
    ast.TryStar: Machine._try,
    ast.Match: Machine._match,
    ast.Delete: Machine._delete,
    ast.FunctionDef: Machine._define_function,
    ast.AsyncFunctionDef: Machine._define_function,
    ast.ClassDef: Machine._define_class,
    ast.Import: Machine._import,
    ast.ImportFrom: Machine._import_from,
    ast.Global: Machine._global,
    ast.Nonlocal: Machine._nonlocal,
    ast.Raise: Machine._raise,
    ast.Break: Machine._break,
    ast.Continue: Machine._continue,
    ast.Assert: Machine._assert,
}


def _sets_globals(call: ast.Call) -> bool:
    """Whether a call may set any name of the file: ``exec(text)``, ``globals().update(...)``."""
    match call.func:
        case ast.Name(id="exec"):
            return len(call.args) == 1
        case ast.Attribute(value=ast.Call(func=ast.Name(id="globals")), attr="update"):
            return True
        case _:
            return False


def _defined_names(node: ast.stmt) -> list[str]:
    """Names that a definition or an import binds; none for other statements."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.Import(names=names):
            return [(each.asname or each.name).partition(".")[0] for each in names]
        case ast.ImportFrom(names=names):
            return [each.asname or each.name for each in names]
        case _:
            return []


def _definitions(body: list[ast.stmt]) -> list[ast.stmt]:
    """What another file can import: definitions and bindings, not what the module does."""
    kinds = (
        ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign,
        ast.AnnAssign, ast.If, ast.Try,
    )  # fmt: skip
    return [each for each in body if isinstance(each, kinds)]


def _is_lost(before: Value | None, value: Value) -> bool:
    """Whether something made in sight would be replaced by nothing that is known."""
    nothing = isinstance(value, Unknown) or (isinstance(value, Const) and value.value is None)
    return nothing and isinstance(
        before, Optimizer | Scaler | Model | Instance | Scheduler | Loader
    )


def _assigned(module: Module, loop: ast.stmt, body: list[ast.stmt]) -> set[str]:
    """Names that a loop's body binds."""
    cached = module.assigned.get(id(loop))
    if cached is None:
        cached = {
            node.id
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        module.assigned[id(loop)] = cached
    return cached


def _is_phases(over: Value | None) -> bool:
    """``for phase in ("train", "val")``: the second time round, other branches are taken."""
    items = over.items if isinstance(over, ListValue) else []
    return len(items) == 2 and all(isinstance(e, Const) and isinstance(e.value, str) for e in items)


def _is_data(module: Module, node: ast.stmt, over: Value | None) -> bool:
    """Whether a loop runs over batches."""
    if isinstance(over, Loader) or (
        isinstance(over, Unknown) and over.op and functions.is_loader(over)
    ):
        return True
    if isinstance(node, ast.While):
        return False
    assert isinstance(node, ast.For | ast.AsyncFor)
    text = module.unparsed(node.iter)
    return (bool(LOADER.search(text)) and not text.startswith("range(")) or (
        "len(" in text and bool(LOADER.search(text))
    )
