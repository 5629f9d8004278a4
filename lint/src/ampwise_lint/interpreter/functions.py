"""Functions of the project: walked where they are called."""

from __future__ import annotations

import ast
import re

from ampwise_lint.path.state import Frame, State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node, defaults_of
from ampwise_lint.source.places import loads, scope_of
from ampwise_lint.source.roles import dotted
from ampwise_lint.torch_model import functions
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    DictValue,
    Function,
    Imported,
    ListValue,
    Loader,
    Manager,
    Optimizer,
    Ref,
    Scope,
    Unknown,
    Value,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.contents import ONE_BY_ONE
from ampwise_lint.values.events import Synchronize

MAX_DEPTH = 14
"""Calls inside calls that are followed."""


WINDOW = re.compile(
    r"(is|do|should|need|needs)_(optim\w*_)?(step|update|sync)|sync_grad"
    r"|(^|_)(last|final)_(micro|accum)|accum\w*_(last|end|done|boundary)|update_(grad|weights)"
)
"""Parameters that tell whether a window ends."""


def _ends_window(function: Function, name: str) -> bool:
    """Whether a parameter decides by itself if the step follows a backward that runs anyway."""
    if WINDOW.search(name):
        return True
    node, roles = function.node, function.module.roles
    if isinstance(node, ast.Lambda) or id(node) not in roles.core:
        return False
    default = defaults_of(node.args).get(name)
    if not (isinstance(default, ast.Constant) and isinstance(default.value, bool)):
        return False
    chosen = [e for e in ast.walk(node) if isinstance(e, ast.If) and _asks(e.test, name)]
    inside = {id(each) for branch in chosen for each in ast.walk(branch)}
    calls = [e for e in ast.walk(node) if isinstance(e, ast.Call)]
    runs = any(_method(each) == "backward" and id(each) not in inside for each in calls)
    return runs and any(_method(each) == "step" and id(each) in inside for each in calls)


def _asks(test: ast.expr, name: str) -> bool:
    """``if name``, ``if not name``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    return isinstance(test, ast.Name) and test.id == name


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def walk(state: State, function: Function, arguments: Arguments, node: Node) -> Value:
    """Walk a function of the project where it is called; what it returns."""
    if arguments.positional and _is_mapped(state, function):
        return _walk_each(state, function, arguments, node)
    value = _walk(state, function, arguments, node)
    loaders = [each for each in arguments.values if isinstance(each, Loader)]
    if len(loaders) == 1 and _passes_on(function.node):
        return Unknown(f"{function.name}(loader)", op="tqdm", operands=(loaders[0],))
    return value


def _passes_on(generator: ast.AST) -> bool:
    """Whether a generator yields what it runs over as it is: ``for x in loader: yield x``."""
    loops = [each for each in ast.walk(generator) if isinstance(each, ast.For)]
    return any(
        isinstance(each, ast.Yield)
        and isinstance(each.value, ast.Name)
        and each.value.id == dotted(loop.target)
        for loop in loops
        for each in ast.walk(loop)
    )


def _walk_each(state: State, function: Function, a: Arguments, node: Node) -> Value:
    """Walk a function for each item of the container it is given."""
    over, *others = a.positional

    def of(value: Value) -> Value:
        return _walk_each(state, function, Arguments([value, *others], a.named, a.open), node)

    match over:
        case DictValue(items=items):
            made = {key: of(value) for key, value in list(items.items())[:ONE_BY_ONE]}
            return DictValue(made, node, over.open or len(items) > ONE_BY_ONE)
        case ListValue(items=items, repeats=repeats):
            return ListValue([of(each) for each in items[:ONE_BY_ONE]], repeats)
        case _:
            return _walk(state, function, a, node)


def _is_mapped(state: State, function: Function) -> bool:
    """Whether a decorator of the project calls a function for each item, however deep it is."""
    for each in getattr(function.node, "decorator_list", []):
        found = function.scope.get(each.id) if isinstance(each, ast.Name) else None
        if isinstance(found, Imported):
            found = state.resolve(found)
        if isinstance(found, Function) and _calls_itself_inside(found.node):
            return True
    return False


def _calls_itself_inside(decorator: ast.AST) -> bool:
    """Whether a function defined in another one is recursive, as what opens lists and dicts is."""
    return any(
        isinstance(inner, ast.FunctionDef)
        and inner is not decorator
        and any(
            isinstance(each, ast.Call) and dotted(each.func) == inner.name
            for each in ast.walk(inner)
        )
        for inner in ast.walk(decorator)
    )


def _walk(state: State, function: Function, arguments: Arguments, node: Node) -> Value:
    active = sum(
        frame.function is not None and frame.function.node is function.node
        for frame in state.frames
    )
    if active or len(state.frames) > MAX_DEPTH:
        return state.unknown(node, "called", function.name)
    state.walked.add(id(function.node))
    scope = Scope(function.module, function.scope)
    frame = Frame(function, scope, node)
    unsure, state.unsure = state.unsure, 0
    with state.in_frame(frame):
        _bind(state, function, arguments, scope)
        if isinstance(function.node, ast.Lambda):
            state.unsure = unsure
            return state.evaluate(function.node.body)
        managers, waits = _decorators(state, function)
        with state.inside(managers):
            state.execute(function.node.body)
        _walk_handed_on(state, function.node, scope)
        if waits:
            state.emit(Synchronize, function.node, "")
    state.unsure = unsure
    return _returned(state, frame, node)


def _walk_handed_on(state: State, around: ast.AST, scope: Scope) -> None:
    """Walk steps that a function defines, and leaves to whom it hands them, or returns them to."""
    named = [each for each in scope.names.values() if isinstance(each, Function)]
    steps = [each for each in named if _is_step_defined_in(state, around, each)]
    # What only a branch hands on that this path does not take is left alone.
    steps = [e for e in steps if id(e.node) in state.named or not _is_named_in(around, e)]
    if not steps:
        return
    called = {
        dotted(each.func)
        for each in ast.walk(around)
        if isinstance(each, ast.Call) and not _is_in_lambda(state, each, around)
    }
    for each in steps:
        # Where another branch calls it, it is not called here.
        if id(each.node) not in state.walked and getattr(each.node, "name", "") not in called:
            state.call(each, Arguments(open=True), each.node)


def _is_named_in(around: ast.AST, function: Function) -> bool:
    """Whether a function is taken by its name anywhere in the one that defines it."""
    return bool(loads(around, getattr(function.node, "name", "")))


def _is_step_defined_in(state: State, around: ast.AST, function: Function) -> bool:
    """Whether a function is one that another defines, with part of a step in it."""
    is_step = id(function.node) in function.module.roles.core
    return is_step and scope_of(state.here, function.node) is around


def _is_in_lambda(state: State, node: ast.AST, around: ast.AST) -> bool:
    inner = scope_of(state.here, node)
    return isinstance(inner, ast.Lambda) and inner is not around


def _returned(state: State, frame: Frame, node: Node) -> Value:
    """What a function returns: of optimizers that different cases return, all."""
    cases = [*frame.may_return, *([] if frame.returned is None else [frame.returned])]
    value = frame.returned
    if value is None or value is NONE:
        value = next((each for each in frame.may_return if each is not NONE), NONE)
    truths = {e.value for e in cases if isinstance(e, Const) and isinstance(e.value, bool)}
    if frame.returned is None:
        truths.add(False)  # its end is reached, too: None
    if len(truths) > 1 or _is_one_text_of_several(value, cases):
        return state.unknown(node, "called")
    if isinstance(value, Optimizer):
        known = {id(value), *map(id, value.others)}
        others = [e for e in cases if isinstance(e, Optimizer) and id(e) not in known]
        value.others = (*value.others, *others)
    return value


def _is_one_text_of_several(value: Value, cases: list[Value]) -> bool:
    """Whether a function that returns a text returns something else in another case."""
    return (
        isinstance(value, Const)
        and isinstance(value.value, str)
        and any(
            each is not NONE and not (isinstance(each, Const) and each.value == value.value)
            for each in cases
        )
    )


def _bind(state: State, function: Function, a: Arguments, scope: Scope) -> None:
    """Give a function's parameters their values."""
    spec = function.node.args
    parameters = [*spec.posonlyargs, *spec.args]
    positional = list(a.positional)
    if function.owner is not None and parameters:
        positional.insert(0, function.owner)
    given = {} if _is_configured(function) else defaults_of(spec)
    left = dict(a.named)
    for parameter, value in zip(parameters, positional, strict=False):
        scope.names[parameter.arg] = value
    for parameter in [*parameters[len(positional) :], *spec.kwonlyargs]:
        name = parameter.arg
        if name in left:
            scope.names[name] = left.pop(name)
        elif name in given and not a.open:
            scope.names[name] = state.evaluate(given[name], quiet=True)
        else:
            scope.names[name] = Unknown(name, "given", periodic=_ends_window(function, name))
    for parameter in parameters:
        left.pop(parameter.arg, None)
    if spec.vararg is not None:
        scope.names[spec.vararg.arg] = ListValue(positional[len(parameters) :])
    if spec.kwarg is not None:
        scope.names[spec.kwarg.arg] = DictValue(left, function.node, open=a.open)


CONFIGURES = re.compile(r"(^|\.)(configurable|automain|main|capture|command|wrap)$")
"""Decorators that give parameters their values: of gin, Sacred, Hydra, Click, Typer, Pyrallis."""


def _is_configured(function: Function) -> bool:
    """Whether what a function is not given comes from a configuration, whatever its defaults."""
    decorators = getattr(function.node, "decorator_list", [])
    return any(
        CONFIGURES.search(dotted(each.func if isinstance(each, ast.Call) else each))
        for each in decorators
    )


def _decorators(state: State, function: Function) -> tuple[list[Manager], bool]:
    """Context managers that a function is decorated with, and whether one waits behind it."""
    found: list[Manager] = []
    waits = False
    for each in reversed(getattr(function.node, "decorator_list", [])):
        value = state.evaluate(each, quiet=True)
        if isinstance(value, Ref) and value.path in library.AUTOCASTS | library.NO_GRAD:
            call = ast.copy_location(ast.Call(each, [], []), each)
            value = functions.call(state, call, value.path, Arguments())
        if isinstance(value, Manager):
            found.append(value)
        if isinstance(value, Function):
            found += _opened_by(state, value)
            waits |= _waits(value)
    return found, waits


def _opened_by(state: State, decorator: Function) -> list[Manager]:
    """What a decorator of the project holds open around the call of what it is given."""
    blocks = [e for e in ast.walk(decorator.node) if isinstance(e, ast.With)]
    items = [each for block in blocks if _runs_given(decorator, block) for each in block.items]
    if not items:
        return []
    scope = Scope(decorator.module, decorator.scope)
    with state.in_frame(Frame(decorator, scope)):
        _bind(state, decorator, Arguments(open=True), scope)
        values = [state.evaluate(each.context_expr, quiet=True) for each in items]
    return [each for each in values if isinstance(each, Manager)]


def _waits(decorator: Function) -> bool:
    """Whether a decorator of the project synchronizes behind the call of what it is given."""
    calls = [each for each in ast.walk(decorator.node) if isinstance(each, ast.Call)]
    waits = [each.lineno for each in calls if _method(each) == "synchronize"]
    runs = [each.lineno for each in calls if _runs_given(decorator, each)]
    return bool(waits and runs) and max(runs) < max(waits)


def _runs_given(decorator: Function, code: ast.AST) -> bool:
    """Whether the first parameter of a decorator is called in some of its code."""
    first = [each.arg for each in decorator.node.args.args[:1]]
    return any(isinstance(e, ast.Call) and dotted(e.func) in first for e in ast.walk(code))


def is_context_manager(function: Function) -> bool:
    """Whether a function is a generator that is decorated to be a context manager."""
    decorators = getattr(function.node, "decorator_list", [])
    return any(dotted(each).endswith("contextmanager") for each in decorators)


def generator_manager(state: State, node: ast.Call, function: Function, a: Arguments) -> Value:
    """A context manager written as a generator: what it holds open around its ``yield``."""
    scope = Scope(function.module, function.scope)
    managers: list[Manager] = []
    with state.in_frame(Frame(function, scope)):
        _bind(state, function, a, scope)
        for each in ast.walk(function.node):
            if isinstance(each, ast.With) and _yields(each):
                values = [state.evaluate(item.context_expr) for item in each.items]
                managers += [value for value in values if isinstance(value, Manager)]
    return Manager("many", node, managers=tuple(managers))


def _yields(node: ast.With) -> bool:
    return any(isinstance(each, ast.Yield) for each in ast.walk(node))
