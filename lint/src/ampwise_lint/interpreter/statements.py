"""What statements do, and which way a path goes through them.

Where a condition is not known the path's oracle is asked, but only if a branch holds part of a
training step. Other branches are walked one after the other, as if both were taken: they can bind
names, not change the order of a step.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from ampwise_lint.interpreter.operators import binary
from ampwise_lint.interpreter.targets import forget_constants
from ampwise_lint.path.conditions import decide, is_known, settled
from ampwise_lint.path.state import Flow, Frame, State
from ampwise_lint.source.roles import dotted, leaves
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    NONE,
    Class,
    Const,
    Function,
    Gradient,
    Manager,
    Scope,
    Tensor,
    Unknown,
    Value,
    is_periodic,
)
from ampwise_lint.values.events import (
    Accumulate,
    Clip,
    GradientRead,
    Report,
    ZeroGrad,
)

UNLIKELY = (
    "nan", "inf", "debug", "resume", "test_only", "eval_only", "evaluate", "dry_run", "profile",
    "no_cuda", "overfit", "isfinite", "only_test", "inference", "smoke", "compile", "ema",
)  # fmt: skip


def _expression(state: State, node: ast.Expr) -> Flow:
    value = state.evaluate(node.value)
    if isinstance(node.value, ast.Call):
        path = dotted(node.value.func)
        if isinstance(value, Manager) and path.endswith("set_grad_enabled") and not state.unsure:
            state.keep(value)
        if path in ("exit", "quit", "sys.exit", "os._exit"):
            return "raise"
        if _sets_globals(node.value):
            forget_constants(state, node)
    return ""


def _assign(state: State, node: ast.Assign) -> None:
    value = state.evaluate(node.value)
    if isinstance(value, Tensor) and value.divided and _is_sum(state, node):
        value = value.but(grown=True, divided=False)
    for target in node.targets:
        state.assign(target, _switch(state, target, value))


SWITCH = re.compile(
    r"^(use_|enable_|with_)?(amp|fp16|bf16|half|mixed|mixed_precision|autocast)(_training|_enabled)?$",
    re.IGNORECASE,
)
"""Names of what switches lower precision on."""


def _switch(state: State, target: ast.expr, value: Value) -> Value:
    """``fp16 = False`` at the top of a script is there to be set to True."""
    is_off = isinstance(value, Const) and value.value is False
    if is_off and isinstance(target, ast.Name) and state.frames[-1].function is None:
        return Unknown(target.id, "given") if SWITCH.match(target.id) else value
    return value


def _is_sum(state: State, node: ast.Assign) -> bool:
    """``total = total + part``, or where a sum begins that another branch adds to."""
    target = node.targets[0]
    if isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
        terms = (dotted(node.value.left), dotted(node.value.right))
        is_own = dotted(target) != "" and dotted(target) in terms
        return is_own and not _is_divided(state.evaluate(target, quiet=True))
    return state.unsure > 0 and _begins_sum(state, node)


def _is_divided(value: Value) -> bool:
    """Whether a loss is a share already: with another it makes one of the same micro-batch."""
    return isinstance(value, Tensor) and value.divided


def _begins_sum(state: State, node: ast.Assign) -> bool:
    """``if key not in sums: sums[key] = part``, where the other branch adds to it."""
    around = state.here.parents.get(id(node))
    if not isinstance(around, ast.If):
        return False
    text = state.here.unparsed(node.targets[0])
    return any(
        isinstance(each, ast.AugAssign)
        and isinstance(each.op, ast.Add)
        and state.here.unparsed(each.target) == text
        for each in (*around.body, *around.orelse)
    )


def _annotated(state: State, node: ast.AnnAssign) -> None:
    if node.value is not None:
        state.assign(node.target, state.evaluate(node.value))


def _augmented(state: State, node: ast.AugAssign) -> None:
    added = state.evaluate(node.value)
    before = state.evaluate(node.target, quiet=True)
    if isinstance(before, Gradient):
        edit = node.value if isinstance(node.op, ast.Div | ast.Mult) else None
        clips = edit is not None and "clip" in ast.unparse(edit).lower()
        if clips:
            state.emit(Clip, node, before.of, True)
        else:
            state.emit(GradientRead, node, True, added, is_linear=edit is not None)
        return
    if isinstance(node.op, ast.Add | ast.Sub):
        _running_sum(state, node, before, added)
    result = binary(state, node, node.op, before, added)
    scales = isinstance(node.op, ast.Div | ast.Mult)
    if scales and isinstance(before, Tensor) and isinstance(result, Tensor) and not before.host:
        # In place: other names see it, too.
        before.divided, before.divisor = result.divided, result.divisor
    if isinstance(before, Const) and state.iteration is not None:
        result = state.unknown(node, label=dotted(node.target))
    if isinstance(result, Tensor) and isinstance(node.op, ast.Add | ast.Sub):
        result.grown, result.divided = True, result.divided and _is_divided(before)
    state.assign(node.target, result)


def _running_sum(state: State, node: ast.AugAssign, before: Value, added: Value) -> None:
    is_number = isinstance(added, Tensor) and added.host
    if is_number:
        rescaled = tensors.is_rescaled(node.value)
        state.emit(Report, node, added, dotted(node.target), rescaled)
    if tensors.is_half_on_device(before) or (isinstance(added, Tensor) and not is_number):
        state.emit(Accumulate, node, before, added)


def _return(state: State, node: ast.Return) -> Flow:
    value = NONE if node.value is None else state.evaluate(node.value)
    if state.unsure:
        state.frames[-1].may_return.append(value)
    else:
        state.frames[-1].returned = value
    return "return"


def _if(state: State, node: ast.If) -> Flow:
    test = state.evaluate(node.test)
    tensors.decides(state, node.test, test)
    periodic = is_periodic([test])
    known = is_known(test)
    branches = node.body + node.orelse
    matters = (
        any(id(each) in state.here.roles.steps for each in branches)
        or (periodic and any(leaves(each) for each in (node.body, node.orelse)))
        or any(map(_leaves_inside_window, branches))
    )
    if known or matters:
        taken = decide(state, test, default=_likely(state, node))
        with state.in_branch(node, test, taken=taken, periodic=periodic, known=known):
            return state.execute(node.body if taken else node.orelse)
    if (way := settled(state, test)) is not None:
        with state.in_branch(node, test, taken=way, periodic=periodic, known=False):
            return state.execute(node.body if way else node.orelse)
    return _both(state, node, test, periodic)


def _leaves_inside_window(statement: ast.stmt) -> bool:
    """``if step % n: return``, in a branch for windows of more than one micro-batch."""
    if not isinstance(statement, ast.If) or not leaves(statement.body):
        return False
    return any(isinstance(getattr(each, "op", None), ast.Mod) for each in ast.walk(statement.test))


def _likely(state: State, node: ast.If) -> bool:
    text = state.here.unparsed(node.test).lower()
    if "isfinite" in text and "not " not in text:  # as it is in a training that goes on
        return True
    if any(each in text for each in UNLIKELY):
        return False
    return not (leaves(node.body) and not node.orelse)


def _both(state: State, node: ast.If, test: Value, periodic: bool) -> Flow:
    """Walk both branches, since neither holds part of a step; the last binding stands."""
    names = state.scope.names
    before = {name: each for name, each in names.items() if isinstance(each, Tensor)}
    flows: list[Flow] = [_branch(state, node, test, periodic, taken=False)]
    # A batch that only one branch copies to the device is on the host in the other.
    other = {name: names[name] for name, each in before.items() if names.get(name) is not each}
    names |= {name: before[name] for name in other}
    flows.append(_branch(state, node, test, periodic, taken=True))
    names |= {name: value for name, value in other.items() if names[name] is before[name]}
    if all(flows):
        frame = state.frames[-1]
        if "return" in flows and not state.unsure:
            frame.returned = next((v for v in frame.may_return if v is not NONE), NONE)
        return flows[-1]
    return ""


def _branch(state: State, node: ast.If, test: Value, periodic: bool, *, taken: bool) -> Flow:
    """Walk a branch that may not be taken."""
    body = node.body if taken else node.orelse
    branch = state.in_branch(node, test, taken=taken, periodic=periodic, known=False)
    with state.perhaps(), branch:
        return state.execute(body)


def _with(state: State, node: ast.With | ast.AsyncWith) -> Flow:
    managers: list[Manager] = []
    for item in node.items:
        value = state.evaluate(item.context_expr)
        manager = value if isinstance(value, Manager) else Manager("other", item.context_expr)
        managers.append(manager)
        if item.optional_vars is not None:
            bound = manager.bound if manager.bound is not None else value
            state.assign(item.optional_vars, bound)
    with state.inside(managers):
        return state.execute(node.body)


def _try(state: State, node: ast.Try | ast.TryStar) -> Flow:
    flow = state.execute(node.body)
    if not flow:
        flow = state.execute(node.orelse)
    # Handlers are for the path that fails; what they define is used when nothing else is.
    for handler in node.handlers:
        for statement in handler.body:
            _define(state, statement)
    return state.execute(node.finalbody) or flow


def _define(state: State, node: ast.stmt) -> None:
    """Walk a definition or an import, unless its names are bound already."""
    names = _defined_names(node)
    if names and all(state.scope.get(each) is None for each in names):
        state.execute([node])


def _match(state: State, node: ast.Match) -> Flow:
    state.evaluate(node.subject)
    with state.perhaps():
        for case in node.cases:
            state.execute(case.body)
    return ""


def _delete(state: State, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Attribute) and target.attr == "grad":
            state.emit(ZeroGrad, node, state.evaluate(target.value))


def _define_function(state: State, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    state.scope.set(node.name, Function(node, state.here, state.scope))


def _define_class(state: State, node: ast.ClassDef) -> None:
    bases = tuple(state.evaluate(each, quiet=True) for each in node.bases)
    class_ = Class(node, state.here, state.scope, bases)
    scope = Scope(state.here, state.scope)
    with state.in_frame(Frame(None, scope)), state.silent():
        state.execute(node.body)
    # Methods look names up in the module, not in the class.
    for name, value in scope.names.items():
        if isinstance(value, Function) and value.scope is scope:
            value.scope, value.class_ = state.scope, class_
        class_.attributes[name] = value
    state.scope.set(node.name, class_)


def _global(state: State, node: ast.Global) -> None:
    state.scope.globals.update(node.names)


def _nonlocal(state: State, node: ast.Nonlocal) -> None:
    for name in node.names:
        found = state.scope.get(name)
        if found is not None:
            state.scope.names[name] = found


def _raise(state: State, node: ast.Raise) -> Flow:
    return "raise"


def _break(state: State, node: ast.Break) -> Flow:
    return "break"


def _continue(state: State, node: ast.Continue) -> Flow:
    return "continue"


def _assert(state: State, node: ast.Assert) -> None:
    tensors.decides(state, node.test, state.evaluate(node.test))


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


STATEMENTS: dict[type[ast.stmt], Callable[[State, Any], Flow | None]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Return: _return,
    ast.If: _if,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.TryStar: _try,
    ast.Match: _match,
    ast.Delete: _delete,
    ast.FunctionDef: _define_function,
    ast.AsyncFunctionDef: _define_function,
    ast.ClassDef: _define_class,
    ast.Global: _global,
    ast.Nonlocal: _nonlocal,
    ast.Raise: _raise,
    ast.Break: _break,
    ast.Continue: _continue,
    ast.Assert: _assert,
}
