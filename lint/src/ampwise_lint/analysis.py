"""All paths through a file that are worth walking, each with what happens on it.

The file is walked as a script first; then every function and method that no path has reached,
with arguments nobody knows: those that no other function of the file calls go first.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from ampwise_lint.drivers import derived, drivers, may_derive, setups
from ampwise_lint.interpreter import calls
from ampwise_lint.interpreter.handlers import HANDLERS
from ampwise_lint.interpreter.imports import run_module
from ampwise_lint.path.oracle import Oracle, explore
from ampwise_lint.path.state import Budget, BudgetError, Frame, State
from ampwise_lint.prefilter import Prefilter
from ampwise_lint.source.project import Module, Project
from ampwise_lint.source.roles import dotted
from ampwise_lint.source.text import UnreadableError, read_text
from ampwise_lint.triggers import STEP
from ampwise_lint.values.abstract import (
    Class,
    Const,
    Function,
    Instance,
    Region,
    Scaler,
    Scope,
    Unknown,
    Value,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_step_wrapper
from ampwise_lint.values.events import Backward, Enter, Event, ScalerStep

E = TypeVar("E", bound=Event)

NODES = 600_000
"""Nodes of syntax walked for one file, over all its paths: a few seconds."""

KEPT = 25_000
"""Of those, kept for the first path through each function; other paths end where this begins."""

SCRIPT_PATHS = 48
FUNCTION_PATHS = 24
ENOUGH = 4
"""Paths after which a function in which nothing has happened is left."""


@dataclass(slots=True)
class Trace:
    """What happens on one path."""

    events: list[Event]
    root: str
    """The function it starts in; empty for the script itself."""
    decided: dict[str, bool] = field(default_factory=dict[str, bool])
    """Conditions this path assumes."""
    _kinds: dict[type[Event], list[Event]] = field(default_factory=dict[type[Event], list[Event]])

    def of(self, kind: type[E]) -> list[E]:
        """Events of one kind, in order."""
        if kind not in self._kinds:  # most rules ask for the same few
            self._kinds[kind] = [each for each in self.events if isinstance(each, kind)]
        return cast("list[E]", self._kinds[kind])


@dataclass(slots=True)
class Analysis:
    """What is known of a file."""

    module: Module
    traces: list[Trace] = field(default_factory=list[Trace])
    networks: list[Trace] = field(default_factory=list[Trace])
    """Networks that the file imports and nothing in sight runs, each by itself in the float16
    region of the file's training: those that hold numbers which float16 does not.
    """
    cut_short: bool = False
    """The file was too large to be walked to its end."""

    def of(self, kind: type[E]) -> Iterator[E]:
        """Events of one kind on any path, each place once."""
        seen: set[int] = set()
        for trace in self.traces:
            for event in trace.of(kind):
                if id(event.node) not in seen:
                    seen.add(id(event.node))
                    yield event

    def any(self, kind: type[E], test: Callable[[E], bool] = lambda _: True) -> bool:
        """Whether an event happens on any path."""
        return any(test(event) for trace in self.traces for event in trace.of(kind))


def analyse(module: Module, prefilter: Prefilter) -> Analysis:
    """Walk a file's paths."""
    analysis = Analysis(module)
    if not _trains(module, prefilter):
        return analysis
    budget = Budget(NODES)
    walked: set[int] = set()
    imported: dict[int, Scope] = {}
    try:
        _explore(analysis, budget, walked, imported, None, SCRIPT_PATHS)
        for derived_roots in _inherited_roots(module, budget, imported):
            seen: set[int] = set()
            for root in derived_roots:
                if id(root.node) not in seen:
                    _explore(analysis, budget, seen, imported, root, FUNCTION_PATHS)
            walked |= seen
        # Without part of a step in it, a file is here since another one that it runs makes steps.
        by_others = not module.roles.core
        for root in _roots(module):
            trains = root.is_core or by_others or analysis.any(Enter) or analysis.any(Backward)
            if id(root.node) not in walked and trains:
                _explore(analysis, budget, walked, imported, root, FUNCTION_PATHS)
        for root in _steps_in_parts(analysis):
            _explore(analysis, budget, walked, imported, root, FUNCTION_PATHS)
        _run_networks(analysis, prefilter, walked)
    except BudgetError:
        analysis.cut_short = True
    return analysis


def _trains(module: Module, prefilter: Prefilter) -> bool:
    """Whether part of a training step is in a file, or in one that it runs."""
    if _is_foreign(module):
        return False
    if STEP.is_in(module.source.text) and module.roles.core:
        return True
    return prefilter.runs_loop(module.path, module.source.text, module.used)


@dataclass(frozen=True, slots=True)
class _Root:
    """A function to start in, and the names that lead to it: classes, then its own."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    path: tuple[str, ...]
    is_core: bool
    """It has part of a step in it; others only belong to a training that there must be."""
    then: str = ""
    """A method of the same object that goes on with the step."""
    class_: ast.ClassDef | None = None
    """The class that inherits it."""
    region: Region | None = None
    """The autocast region it is run in."""

    @property
    def name(self) -> str:
        """The names that lead to it, with dots."""
        return ".".join(self.path)


def _explore(
    analysis: Analysis,
    budget: Budget,
    walked: set[int],
    imported: dict[int, Scope],
    root: _Root | None,
    most: int,
) -> None:
    def walk(oracle: Oracle) -> Trace:
        state = State(analysis.module, oracle, budget, imported, HANDLERS)
        try:
            if root is None:
                run_module(state, analysis.module, main=True)
            else:
                _start(state, analysis.module, root)
        finally:
            if state.trace:  # with the defaults of a script nothing may happen, as with no data set
                walked.update(state.walked)
        name = root.name if root is not None else ""
        return Trace(state.trace, name, oracle.decided)

    # Other ways through one function may use up half of what is left; the first one all of it.
    floor, before = max(budget.left // 2, KEPT), len(analysis.traces)
    for count, trace in enumerate(explore(walk, most), 1):
        if trace.events:
            analysis.traces.append(trace)
        nothing = count == ENOUGH and not analysis.traces[before:]
        if budget.left < floor or nothing:
            break


FOREIGN = {"paddle", "mindspore", "mxnet", "tensorflow", "oneflow"}


def _is_foreign(module: Module) -> bool:
    """Whether a file trains with another library, whose words may be the same."""
    used = {name.partition(".")[0] for _, names in module.imports.statements for name in names}
    return bool(used & FOREIGN) and "torch" not in used


def _start(state: State, module: Module, root: _Root) -> None:
    """Walk one function with arguments nobody knows."""
    scope = run_module(state, module, main=False)
    value: Value | None = scope.names.get(root.path[0])
    owner: Instance | None = None
    with state.in_frame(Frame(None, scope)):
        for name in root.path[1:]:
            if not isinstance(value, Class):
                return
            owner = Instance(value)
            if name != "__init__":
                calls.initialise(state, owner, Arguments(open=True), root.node)
                _set_up(state, owner, root)
            found = value.lookup(name)
            value = found[0] if found is not None else None
        if not isinstance(value, Function) or value.node is not root.node:
            if root.class_ is not None:
                return
            # Bound again since, or only under a condition.
            value = Function(root.node, module, scope)
        if owner is not None and is_step_wrapper(owner.class_):
            return
        bound = Function(value.node, value.module, value.scope, None, value.class_)
        decorators = {dotted(each) for each in root.node.decorator_list}
        if owner is not None and "staticmethod" not in decorators:
            bound.owner = Unknown("cls", "given") if "classmethod" in decorators else owner
        with state.in_region(root.region) if root.region is not None else nullcontext():
            state.call(bound, Arguments(open=True), root.class_ or root.node)
        if root.then and owner is not None:
            state.call(_method(owner, root.then), Arguments(open=True), root.node)


def _set_up(state: State, owner: Instance, root: _Root) -> None:
    """Let the other methods run that set an object's optimizer, scaler or schedule.

    Whoever owns it calls them before the step. What happens in them is told where they are walked
    themselves.
    """
    walked = set(state.walked)
    with state.silent():
        for name, sets in setups(owner.class_, root.path[-1]).items():
            if any(_is_empty(owner.attributes.get(each)) for each in sets):
                state.call(_method(owner, name), Arguments(open=True), root.node)
    state.walked = walked


def _is_empty(value: Value | None) -> bool:
    return value is None or (isinstance(value, Const) and value.value is None)


def _method(owner: Instance, name: str) -> Function:
    found = owner.class_.lookup(name)
    assert found is not None
    function, class_ = found
    assert isinstance(function, Function)
    return Function(function.node, function.module, function.scope, owner, class_)


NETWORK_NODES = 60_000
"""Nodes walked for networks that nothing in sight runs, all of a file's together."""
NETWORK_PATHS = 12


def _run_networks(analysis: Analysis, prefilter: Prefilter, walked: set[int]) -> None:
    """Walk networks that the training may run by way of a registry, a name or a callable."""
    module = analysis.module
    region = _float16_region(analysis)
    if region is None:
        return
    budget = Budget(NETWORK_NODES)
    text, used = module.source.text, module.used
    for path in sorted(prefilter.reached(module.path, text, used, packages=True)):
        imported: dict[int, Scope] = {}
        for other, root in _networks(module.project, path, region):
            walk = partial(_run, other, root, budget, imported)
            if id(root.node) not in walked:
                try:
                    analysis.networks += explore(walk, NETWORK_PATHS)
                except BudgetError:
                    return


def _run(
    module: Module, root: _Root, budget: Budget, imported: dict[int, Scope], oracle: Oracle
) -> Trace:
    state = State(module, oracle, budget, imported, HANDLERS)
    _start(state, module, root)
    return Trace(state.trace, root.name, oracle.decided)


def _float16_region(analysis: Analysis) -> Region | None:
    """The region in which the file trains in float16 by a scaler, if it does."""
    for trace in analysis.traces:
        if any(isinstance(each.scaled, Scaler) for each in trace.of(Backward)):
            for each in trace.of(Enter):
                region = each.region
                if region.enabled and region.dtype == "float16" and not each.context.no_grad:
                    return region
    return None


EXTREME = re.compile(r"\b\d[\d.]*[eE][+-]?\d")
FLOAT16 = 2.0**-25, 65504.0
"""What is nearer to 0 is 0 in float16, what is beyond is inf."""


def _networks(project: Project, path: Path, region: Region) -> Iterator[tuple[Module, _Root]]:
    """Networks of a file in which a number stands that float16 does not hold."""
    try:
        if not EXTREME.search(read_text(path).text):
            return
        module = project.module(path)
    except UnreadableError:  # said when that file is checked itself
        return
    for class_ in module.tree.body:
        if isinstance(class_, ast.ClassDef) and any(map(_is_extreme, ast.walk(class_))):
            for each in class_.body:
                if isinstance(each, ast.FunctionDef) and each.name == "forward":
                    names = (class_.name, "forward")
                    yield module, _Root(each, names, is_core=True, region=region)


def _is_extreme(node: ast.AST) -> bool:
    number = node.value if isinstance(node, ast.Constant) else None
    return isinstance(number, float) and (0 < number < FLOAT16[0] or FLOAT16[1] < number < math.inf)


def _steps_in_parts(analysis: Analysis) -> list[_Root]:
    """Methods that run a scaled backward, each with one of its class that makes the step.

    Only where nothing in the file calls the two one after the other.
    """
    backward: set[str] = set()
    step: set[str] = set()
    for trace in analysis.traces:
        scaled = any(isinstance(each.scaled, Scaler) for each in trace.of(Backward))
        if scaled and not trace.of(ScalerStep):
            backward.add(trace.root)
        elif trace.of(ScalerStep) and not trace.of(Backward):
            step.add(trace.root)
        elif scaled:
            return []
    roots = {each.name: each for each in _roots(analysis.module)}
    return [
        replace(roots[first], then=second.rpartition(".")[2])
        for first in sorted(backward & roots.keys())
        for second in sorted(step & roots.keys())
        if roots[first].path[:-1] and roots[first].path[:-1] == roots[second].path[:-1]
    ]


def _inherited_roots(
    module: Module, budget: Budget, imported: dict[int, Scope]
) -> Iterator[list[_Root]]:
    """For each class derived from one of the project: inherited methods that run its own."""
    if not may_derive(module):
        return
    scope = run_module(State(module, Oracle({}), budget, imported, HANDLERS), module, main=False)
    for class_ in derived(module, scope):
        found = [
            _Root(each.node, (class_.node.name, each.node.name), is_core=True, class_=class_.node)
            for each in drivers(class_)
            if not isinstance(each.node, ast.Lambda)
        ]
        if found:
            yield found


def _roots(module: Module) -> list[_Root]:
    """Functions of the file, those that nothing in it calls first."""
    found: list[_Root] = []
    handed = set[int]() if module.roles.core else _handing_on(module)

    def collect(body: list[ast.stmt], path: tuple[str, ...]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_core = id(node) in module.roles.core
                if is_core or _belongs(node) or id(node) in handed:
                    found.append(_Root(node, (*path, node.name), is_core))
            elif isinstance(node, ast.ClassDef):
                collect(node.body, (*path, node.name))
            elif isinstance(node, ast.If | ast.Try):
                collect([*node.body, *node.orelse], path)

    collect(module.tree.body, ())
    called = {
        each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
        for each in module.index.of(ast.Call)
    }
    return sorted(found, key=lambda each: (not each.is_core, each.node.name in called))


def _handing_on(module: Module) -> set[int]:
    """``id`` of functions that leave the steps to another file: ``fit(config, make, begin)``."""
    own = {each.name for each in module.tree.body if isinstance(each, ast.FunctionDef)}
    return {
        around
        for call in module.index.of(ast.Call)
        if dotted(call.func) not in own
        and any(isinstance(given, ast.Name) and given.id in own for given in call.args)
        for around in module.around(call)
    }


def _belongs(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function validates, saves, makes data or an optimizer, or is one under autocast.

    Or a framework's step, which tells how a class trains.
    """
    if node.name == "training_step":
        return True
    names = {"no_grad", "inference_mode", "eval", "autocast", "DataLoader", "optim"}
    names |= {"state_dict", "load_state_dict"}
    return any(
        (isinstance(each, ast.Attribute) and each.attr in names)
        or (isinstance(each, ast.Name) and each.id in names)
        for each in ast.walk(node)
    )
