"""# scaled-loss-reported

## What it does
Reports a loss that is printed, logged or summed after it was multiplied by the loss scale, or
after it was divided by the accumulation window, in training or in the evaluation beside it. Silent
for a sum over one window, over a batch that is trained on in parts, or over as many batches, for
one that the number of updates divides, and where it is multiplied back.

## Why is this bad
The figure is 65536 times too large and halves or doubles with the scale, or it is too small by
the number of micro-batches. Runs cannot be compared, and early stopping or best-checkpoint
logic acts on it.

## Example
    loss = criterion(model(x), y) / accumulate
    scaler.scale(loss).backward()
    running += loss.detach()

## Use instead
    loss = criterion(model(x), y)
    scaler.scale(loss / accumulate).backward()
    running += loss.detach()

## Fix safety
Unsafe: `--unsafe-fixes` multiplies a divided loss by its divisor again where it is reported, and
reports a scaled one as it was before scaling: backward is then called on the scaled loss itself.
The figures in logs, and what thresholds compare with them, change. No fix where the loss was
divided or scaled in another function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.branches import is_of_fault
from ampwise_lint.queries.edits import edit, receiver
from ampwise_lint.queries.precision import evaluates, uses_amp
from ampwise_lint.queries.steps import step_loops
from ampwise_lint.queries.windows import accumulates
from ampwise_lint.queries.wrappers import given_in_parts
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import (
    assignments,
    block_of,
    grouped,
    has_comment,
    loads,
    scope_of,
    stores,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Scaler, Tensor, Wrapper, key_of
from ampwise_lint.values.events import Accumulate, Report


@rule("AMP115", "scaled-loss-reported", "warning", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    loops = step_loops(code)
    for trace in code.traces:
        windows = _windows(trace)
        counts: Windows = {key: set() for key in (*windows, *_counts(trace))}
        for event in trace.events:
            if any(id(each.node) in loops.nodes for each in event.context.loops):
                if is_of_fault(event):
                    continue  # what is inf or nan is that in any scale
                if isinstance(event, Report):
                    yield from _mistakes(event, event.tensor, windows)
                elif (
                    isinstance(event, Accumulate)
                    and isinstance(event.added, Tensor)
                    and not event.added.host  # a number is reported, too
                ):
                    yield from _mistakes(event, event.added, windows)
            elif isinstance(event, Report) and _is_divided_aside(event, counts):
                yield _too_small(event)


Windows = dict[str, set[int]]
"""What losses are divided by, and the loops that run over the micro-batches of one window only."""


def _windows(trace: Trace) -> Windows:
    found: Windows = {}
    for backward, step in accumulates(trace):
        if isinstance(backward.tensor, Tensor) and backward.tensor.divided:
            around = {id(each.node) for each in step.context.loops}
            inner = {id(each.node) for each in backward.context.loops} - around
            found.setdefault(key_of(backward.tensor.divisor), set()).update(inner)
    for _, loss in given_in_parts(trace):
        found.setdefault(key_of(loss.divisor), set())
    return found


COUNT = re.compile(r" % (.+)\) Eq 0\)$")


def _counts(trace: Trace) -> Iterator[str]:
    """What the steps of windows wait for: `n` of ``if (i + 1) % n == 0``."""
    for _, step in accumulates(trace):
        for each in step.context.branches:
            if each.periodic and (count := COUNT.search(each.key)):
                yield count[1]


def _is_divided_aside(event: Report, counts: Windows) -> bool:
    """Whether an evaluation beside the training, which accumulates nothing, divides its loss."""
    aside = bool(event.context.loops) and evaluates(event)
    return aside and _is_too_small(event, event.tensor, counts)


def _mistakes(event: Report | Accumulate, tensor: Tensor, windows: Windows) -> Iterator[Mistake]:
    yield from _scaled(event, tensor)
    if _is_too_small(event, tensor, windows):
        yield _too_small(event)


def _too_small(event: Report | Accumulate) -> Mistake:
    return Mistake(
        event.node,
        event.module,
        "the loss is reported after it was divided for accumulation: the figure is too "
        "small by the number of micro-batches; report it before dividing, or multiply back",
        mend=partial(_multiplied_back, event),
    )


def _scaled(event: Report | Accumulate, tensor: Tensor) -> Iterator[Mistake]:
    if isinstance(tensor.scaled, Scaler | Wrapper):
        yield Mistake(
            event.node,
            event.module,
            "the loss is reported after it was multiplied by the loss scale: the figure is up to "
            "65,536 times too large and jumps with the scale; report it before scaling",
            mend=partial(_unscaled, event),
        )


def _is_too_small(event: Report | Accumulate, tensor: Tensor, windows: Windows) -> bool:
    """Whether it was divided by the number of micro-batches, and nothing makes up for that."""
    inner = windows.get(key_of(tensor.divisor)) if tensor.divided else None
    if inner is None:
        return False
    if isinstance(event, Report) and event.into == "list":
        return _is_once(event, inner) or _is_averaged(event)
    if isinstance(event, Report) and event.rescaled:
        return False
    return not _is_window_sum(event, inner)


def _is_once(event: Report, inner: set[int]) -> bool:
    """Whether it is kept behind a window: the loss of its last micro-batch alone."""
    if not inner:
        return event.context.is_periodic
    return not any(id(each.node) in inner for each in event.context.loops)


def _is_averaged(event: Report) -> bool:
    """Whether the mean of all that is in a list is taken: ``np.mean(losses)``."""
    name, index = receiver(event.node), event.module.index
    means = [_argument(each, MEANS) for each in index.of(ast.Call)]
    means += [
        _argument(each.left, SUM)
        for each in index.of(ast.BinOp)
        if isinstance(each.op, ast.Div) and _argument(each.right, LENGTH) == name
    ]
    return bool(name) and name in means


MEANS, SUM, LENGTH = ("mean", "fmean", "nanmean", "average"), ("sum",), ("len",)


def _argument(node: ast.expr, functions: tuple[str, ...]) -> str:
    """``losses`` of ``np.mean(losses)``, where that is one of some functions."""
    match node:
        case ast.Call(func=function, args=[first, *_]):
            return dotted(first) if dotted(function).rpartition(".")[2] in functions else ""
        case _:
            return ""


def _is_window_sum(event: Report | Accumulate, inner: set[int]) -> bool:
    """Added up over the micro-batches of one window, which makes it their mean."""
    if isinstance(event, Report) and not event.into:
        return False
    loop = event.context.loops[-1].node
    if id(loop) in inner or _runs_as_often(loop) or _is_sum_of_batch(event):
        return True
    return _starts_anew(event, loop) or _is_mean_of_windows(event, loop)


def _is_sum_of_batch(event: Report | Accumulate) -> bool:
    """Whether the sum begins at 0 for each batch, whose parts the micro-batches are."""
    around = event.context.loops[-2:]
    if len(around) < 2 or around[1].over_data or not around[0].over_data:
        return False
    if not isinstance(event.node, ast.AugAssign):
        return False
    name = dotted(event.node.target)
    return any(_sets(each, name) for each in getattr(around[0].node, "body", []))


def _runs_as_often(loop: Node) -> bool:
    """Whether a loop runs as often as what is in it is divided by: ``for _ in range(n)``."""
    match loop:
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[times])):
            divisors = [
                each.right if isinstance(each, ast.BinOp) else each.value
                for each in ast.walk(loop)
                if isinstance(each, ast.BinOp | ast.AugAssign) and isinstance(each.op, ast.Div)
            ]
            return ast.unparse(times) in map(ast.unparse, divisors)
        case _:
            return False


def _is_mean_of_windows(event: Report | Accumulate, loop: Node) -> bool:
    """Whether the sum is divided by a number of windows: ``total / updates``, ``total / every``."""
    if not isinstance(event.node, ast.AugAssign):
        return False
    name, scope = dotted(event.node.target), scope_of(event.module, event.node)
    counted = _counted(loop)
    counts = {
        dotted(each.right)
        for each in ast.walk(loop)
        if isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Mod)
        and dotted(each.left) in counted
    }
    divisors = {
        dotted(each.right)
        for each in ast.walk(scope)
        if isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Div)
        and name in map(dotted, ast.walk(each.left))
    }
    return bool(divisors) and divisors <= counted | counts


def _counted(loop: Node) -> set[str]:
    """What is counted under a condition only, as updates are: not each micro-batch."""
    always = {id(each) for each in getattr(loop, "body", [])}
    adds = [each for each in ast.walk(loop) if isinstance(each, ast.AugAssign)]
    counts = [e for e in adds if isinstance(e.value, ast.Constant) and isinstance(e.op, ast.Add)]
    often = {dotted(each.target) for each in counts if id(each) in always}
    return {dotted(each.target) for each in counts} - often


def _starts_anew(event: Report | Accumulate, loop: Node) -> bool:
    """Whether the sum is set to zero where it is added to, and not for each micro-batch."""
    if not isinstance(event.node, ast.AugAssign):
        return False
    name = dotted(event.node.target)
    function = scope_of(event.module, event.node)
    around = function if _is_kept(function, name) else loop
    each_time = list(takewhile(lambda each: not _skips(each), getattr(around, "body", [])))
    return any(
        (_sets(each, name) and each not in each_time) or _is_multiplied(each, name)
        for each in ast.walk(around)
    )


def _is_kept(function: ast.AST, name: str) -> bool:
    """Whether a name outlives the calls of a function, which is called for each micro-batch."""
    kept = (each for each in ast.walk(function) if isinstance(each, ast.Nonlocal | ast.Global))
    return any(name in each.names for each in kept)


def _skips(statement: ast.stmt) -> bool:
    """``if (i + 1) % n: continue``: what stands behind it runs once a window."""
    return isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue)


def _sets(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(dotted(each) == name for each in node.targets)


def _is_multiplied(node: ast.AST, name: str) -> bool:
    """``total * n``: it may be multiplied back."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return name in (dotted(left), dotted(right))
        case _:
            return False


# ---------------------------------------------------------------------- fixes


def _reported(event: Report | Accumulate) -> ast.expr | None:
    """The expression that is reported."""
    node = event.node
    if isinstance(node, ast.AugAssign):
        return node.value
    if isinstance(event, Report) and event.into == "list" and isinstance(node, ast.Call):
        return node.args[0] if node.args else None
    return node if isinstance(node, ast.expr) else None


def _name_of(node: ast.expr) -> str:
    """``loss`` of ``loss.detach().item() / 8`` and ``float(loss)``; empty for other expressions."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner) | ast.BinOp(left=inner, op=ast.Mult() | ast.Div()):
            return _name_of(inner)
        case ast.Call(func=ast.Attribute() as inner, args=[], keywords=[]):
            return _name_of(inner)
        case ast.Call(func=ast.Name(id="float"), args=[inner]):
            return _name_of(inner)
        case _:
            return ""


def _multiplied_back(event: Report | Accumulate) -> tuple[Edit, ...]:
    """``loss.item()`` of a loss that was divided by `n` becomes ``loss.item() * n``."""
    reported = _reported(event)
    name = _name_of(reported) if reported is not None else ""
    if reported is None or not name:
        return ()
    module = event.module
    divisors = _divisors(scope_of(module, event.node), name)
    if len({ast.dump(each) for each in divisors}) != 1:
        return ()
    divisor = divisors[0]
    if not dotted(divisor) and not isinstance(divisor, ast.Constant):
        return ()
    return (edit("replace", reported, f"{module.text_of(reported)} * {module.text_of(divisor)}"),)


def _divisors(scope: ast.AST, name: str) -> list[ast.expr]:
    """What a function divides a name's value by."""
    found: list[ast.expr] = []
    for each in assignments(scope, name):
        value = each.value
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Div):
            found.append(each.value)
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            found.append(value.right)
    return found


def _unscaled(event: Report | Accumulate) -> tuple[Edit, ...]:
    """Report what went into ``scaler.scale(...)``."""
    reported = _reported(event)
    if reported is None:
        return ()
    module = event.module
    inline = _scale_call(reported)
    if inline is not None:
        return (edit("replace", inline, grouped(module, inline.args[0])),)
    name = _name_of(reported)
    scope = scope_of(module, event.node)
    made = [e for e in assignments(scope, name) if e.value is not None and _is_scaling(e.value)]
    if not name or len(made) != 1 or not isinstance(made[0], ast.Assign):
        return ()
    call = made[0].value
    assert isinstance(call, ast.Call)
    source = call.args[0]
    if dotted(source) == name:
        return _scaled_at_backward(module, made[0], call, name)
    # The unscaled loss still has a name of its own.
    if isinstance(source, ast.Name) and stores(scope, source.id) == 1:
        return (edit("replace", loads(reported, name)[0], source.id),)
    return ()


def _scaled_at_backward(
    module: Module, made: ast.Assign, call: ast.Call, name: str
) -> tuple[Edit, ...]:
    """``loss = scaler.scale(loss)`` goes, ``loss.backward()`` becomes that of the scaled loss."""
    behind = block_of(module, made)
    behind = behind[behind.index(made) + 1 :]
    backward = [
        node.func.value
        for each in behind
        for node in ast.walk(each)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and dotted(node.func.value) == name
    ]
    if len(backward) != 1 or has_comment(module, made):
        return ()
    return (edit("remove", made), edit("replace", backward[0], module.text_of(call)))


def _scale_call(node: ast.expr) -> ast.Call | None:
    """``scaler.scale(loss)`` in ``scaler.scale(loss).item()``."""
    calls = [e for e in ast.walk(node) if isinstance(e, ast.expr) and _is_scaling(e)]
    return calls[0] if len(calls) == 1 and isinstance(calls[0], ast.Call) else None


def _is_scaling(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "scale"
        and len(node.args) == 1
    )
