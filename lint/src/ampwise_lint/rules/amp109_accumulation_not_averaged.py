"""# accumulation-not-averaged

## What it does
Reports backward of a loss that is not divided (or weighted), when gradients of several
micro-batches add up before the step. A scaler's wrapper that is told when a window ends
(`need_update=`) counts as a step. Dividing the gradients instead of the loss counts as well, and so
does an Accelerator that knows the number (`gradient_accumulation_steps`). Silent for a copy of the
network that ends with its function, as an adversary's: nobody steps on its gradients.

## Why is this bad
With mean losses, N micro-batches give N times the gradient of the global batch: the step is N
times too large for SGD, clipping bites N times as often, and float16 gradients of activations
are N times larger, so the loss scale has to be N times smaller to keep them below 65504.

## Example
    for i, (x, y) in enumerate(loader):
        scaler.scale(criterion(model(x), y)).backward()
        if (i + 1) % 8 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Use instead
    for i, (x, y) in enumerate(loader):
        scaler.scale(criterion(model(x), y) / 8).backward()
        if (i + 1) % 8 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Fix safety
Unsafe: `--unsafe-fixes` divides the loss at its backward by the number the window is counted with
(`N` of `(i + 1) % N == 0`, of `range(N)`, `len()` of a list); what is logged stays. Steps become N
times smaller (SGD), so a learning rate that was tuned on the sum has to be tuned again, a last
window that is cut short weighs less than the others, and sums over samples or tokens have to be
divided by their number instead. No fix where the number is not in sight.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.precision import uses_amp
from ampwise_lint.queries.windows import accumulates, zeroed_with
from ampwise_lint.queries.wrappers import is_led
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import (
    assignments,
    bound_in,
    functions_of,
    grouped,
    in_reach,
    is_inside,
    scope_of,
)
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Const, Tensor, Unknown, key_of
from ampwise_lint.values.events import (
    Backward,
    Forward,
    GradientRead,
    Managed,
    OptimizerStep,
    ScalerStep,
)


@rule("AMP109", "accumulation-not-averaged", "warning", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    found: dict[int, tuple[Backward, ScalerStep | OptimizerStep]] = {}
    for trace in code.traces:
        if is_led(trace) or any(
            each.is_edit and each.divisor is not None for each in trace.of(GradientRead)
        ):
            continue
        for backward, step in accumulates(trace):
            if _is_plain_sum(trace, backward, step):
                found.setdefault(id(backward.node), (backward, step))
    # The same loss, with and without scaling, is one mistake.
    plain = [each for each in found.values() if each[0].scaled is None]
    scaled = [each for each in found.values() if each[0].scaled is not None]
    given = [each for each in code.of(Managed) if _is_whole(each.loss) and _ends_window(each)]
    for each in scaled or ([] if given else plain):
        edits = _edits([each, *plain] if scaled else [each])
        yield _mistake(each[0], edits)
    for each in given:
        yield _mistake(each, ())


WORLD = re.compile(r"world_?size")


def _is_whole(loss: Tensor | None) -> bool:
    """Whether a loss is divided by nothing, or by the number of processes that add it up."""
    return loss is not None and (not loss.divided or bool(WORLD.search(key_of(loss.divisor))))


ENDS_WINDOW = re.compile(r"^(need_)?update(_grad)?$")
"""What a scaler's wrapper is told by: timm's, and that of MAE."""


def _ends_window(event: Managed) -> bool:
    """``loss_scaler(loss, optimizer, need_update=(i + 1) % n == 0)``: a step once a window."""
    loops = event.context.loops
    if not loops or event.loss is None or _is_no_whole_loss(event.loss):
        return False
    loop = loops[-1].node
    call = event.node
    if not isinstance(call, ast.Call):
        return False
    # By position, a wrapper is asked nothing else of the count of batches.
    ends = [each for each in call.args if isinstance(each, ast.Compare)]
    ends += [each.value for each in call.keywords if each.arg and ENDS_WINDOW.match(each.arg)]
    return any(_remainders(each, loop) for each in ends) and not _sees_whole_batch(
        loop, _target(loop)
    )


def _is_plain_sum(trace: Trace, backward: Backward, step: ScalerStep | OptimizerStep) -> bool:
    loss = backward.tensor
    if not isinstance(loss, Tensor) or isinstance(loss.of, Unknown):
        return False
    if loss.divided and not isinstance(loss.divisor, Const):
        return False
    if _is_no_whole_loss(loss) or _is_one(trace, backward, step):
        return False
    if loss.divided and isinstance(loss.divisor, Const):
        value = loss.divisor.value
        if not isinstance(value, int | float) or value not in (1, 2, 3):
            return False
        if repr(value) == _count(backward, step):
            return False
    around = _around(backward)
    if _is_nested(backward, step) and _loops_over_terms(trace, around):
        return False
    if _sees_whole_batch(around, _target(around)) or _calls_for_whole_batch(backward, around):
        return False
    # Gradients that are zeroed on each micro-batch do not add up.
    return not any(zeroed_with(trace, backward))


def _is_no_whole_loss(loss: Tensor) -> bool:
    """Whether what goes backward is something else than the loss of a micro-batch."""
    if isinstance(loss.factor, Const) and loss.factor.value == 0:
        return True  # there to give unused parameters a gradient
    # The sum of the losses so far, each of which is divided.
    parts = loss.grown and any(isinstance(e, Tensor) and e.divided for e in loss.inputs)
    return parts or loss.op == "dot"  # a gradient that was kept of the whole batch


def _loops_over_terms(trace: Trace, loop: Node) -> bool:
    """Whether a loop is over the terms of one loss, and no micro-batches.

    They are written out, or the network that runs first is given the same each time: over widths,
    over scales.
    """
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple | ast.List):
        return True
    calls = (
        call
        for each in trace.of(Forward)
        if each.is_root and [around.node for around in each.context.loops[-1:]] == [loop]
        if (call := _called_in(each, loop)) is not None
    )
    first = next(calls, None)
    return first is not None and _is_given_from_outside(first, bound_in(loop))


def _called_in(event: Forward, loop: Node) -> ast.AST | None:
    """The call in a loop that runs a network, or leads to where it runs."""
    return next((each.node for each in event.way if is_inside(each.module, each.node, loop)), None)


def _is_given_from_outside(call: ast.AST, bound: set[str]) -> bool:
    """Whether a network is given nothing that one of some names stands for."""
    given = call.args if isinstance(call, ast.Call) else []
    first = {dotted(each).partition(".")[0] for each in given}
    return bool(first) and first.isdisjoint(bound | {"", "self"})


def _around(backward: Backward) -> Node:
    """The loop over micro-batches, or the function that is called for each."""
    loops = backward.context.loops
    return loops[-1].node if loops else functions_of(backward.module, backward.node)[0]


ONE = {"Gt 1)": False, "Eq 1)": True, "LtE 1)": True, "GtE 2)": False, "Lt 2)": True}
"""Comparisons of the number of micro-batches, and how they turn out where that is one."""


def _is_one(trace: Trace, backward: Backward, step: ScalerStep | OptimizerStep) -> bool:
    """Whether a branch that this path takes is for windows of one micro-batch."""
    count = _count(backward, step).rpartition(".")[2]
    return bool(count) and any(
        count in key and key.endswith(end) and taken is expected
        for key, taken in trace.decided.items()
        for end, expected in ONE.items()
    )


def _target(loop: Node) -> str:
    return dotted(loop.target) if isinstance(loop, ast.For) else ""


def _calls_for_whole_batch(backward: Backward, loop: Node) -> bool:
    """Whether the loss is that of all micro-batches in a function that is told which one is new."""
    over = _target(loop)
    defined = {
        each.name: each
        for each in backward.module.index.of(ast.FunctionDef)
        if isinstance(each, ast.FunctionDef)
    }
    for call in ast.walk(loop):
        function = defined.get(dotted(call.func)) if isinstance(call, ast.Call) else None
        if not over or function is None or not isinstance(call, ast.Call):
            continue
        given = zip([each.arg for each in function.args.args], call.args, strict=False)
        names = [name for name, value in given if dotted(value) == over]
        names += [e.arg for e in call.keywords if e.arg is not None and dotted(e.value) == over]
        if any(_sees_whole_batch(function, each) for each in names):
            return True
    return False


def _sees_whole_batch(loop: Node, over: str) -> bool:
    """Whether each loss is that of all micro-batches: ``cat(kept[:i] + [new] + kept[i + 1:])``.

    So contrastive losses are accumulated: each backward adds what one micro-batch adds to it.
    """
    cuts = [each.slice for each in ast.walk(loop) if isinstance(each, ast.Subscript)]
    uppers = {dotted(each.upper) for each in cuts if isinstance(each, ast.Slice) and each.upper}
    lowers = {
        dotted(each.lower.left)
        for each in cuts
        if isinstance(each, ast.Slice) and isinstance(each.lower, ast.BinOp)
    }
    return (bool(over) and over in uppers & lowers) or _replaces_in_batch(loop)


def _replaces_in_batch(loop: Node) -> bool:
    """``kept[i] = new`` and ``cat(kept)``: the same, in place."""
    stored = {
        dotted(each.value)
        for each in ast.walk(loop)
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)
    }
    return any(
        isinstance(each, ast.Call)
        and dotted(each.func).rpartition(".")[2] in ("cat", "stack", "concat")
        and dotted(each.args[0] if each.args else each) in stored - {""}
        for each in ast.walk(loop)
    )


def _is_nested(backward: Backward, step: ScalerStep | OptimizerStep) -> bool:
    return len(backward.context.loops) > len(step.context.loops)


def _edits(found: list[tuple[Backward, ScalerStep | OptimizerStep]]) -> tuple[Edit, ...]:
    """Divide each loss where it goes backward; none where one of them cannot be."""
    edits: list[Edit] = []
    for backward, step in found:
        count, loss = _count(backward, step), _loss(backward.node)
        if not count or loss is None:
            return ()
        text = f"{grouped(backward.module, loss)} / {count}"
        owner = getattr(getattr(backward.node, "func", None), "value", None)
        edits.append(edit("replace", loss, f"({text})" if loss is owner else text))
    return tuple(edits)


def _loss(node: ast.AST) -> ast.expr | None:
    """``loss`` of ``scaler.scale(loss).backward()`` and of ``loss.backward()``."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr="scale"), args=[loss]))
        ):
            return loss
        case ast.Call(func=ast.Attribute(value=loss, attr="backward")):
            return loss
        case _:
            return None


def _count(backward: Backward, step: ScalerStep | OptimizerStep) -> str:
    """How many micro-batches a window has, as it may be written at the backward."""
    loop = _around(backward)
    number = _of_loop(loop, backward) if _is_nested(backward, step) else _of_test(loop, step)
    if number is None or not _is_count(number):
        return ""
    module = backward.module
    if module is not step.module and not isinstance(number, ast.Constant):
        return ""
    is_made = isinstance(number, ast.Call) and dotted(number.func) == "len"
    named = number.args[0] if isinstance(number, ast.Call) and is_made else number
    return module.unparsed(number) if in_reach(module, named, backward.node) else ""


def _of_test(loop: ast.AST, step: ScalerStep | OptimizerStep) -> ast.expr | None:
    """``n`` of ``if (i + 1) % n == 0`` around the step, or of the ``continue`` that goes before."""
    tests = [
        e.node.test for e in step.context.conditions if e.periodic and isinstance(e.node, ast.If)
    ]
    if not tests:
        tests = [
            each.test
            for each in ast.walk(loop)
            if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Continue)
        ]
    found = [divisor for test in tests for divisor in _remainders(test, loop)]
    return found[0] if len({ast.dump(each) for each in found}) == 1 else None


def _remainders(test: ast.expr, loop: ast.AST) -> list[ast.expr]:
    """What a condition takes remainders of; that of a flag stands where the flag is set."""
    if isinstance(test, ast.Name):
        set_here = [e.value for e in assignments(loop, test.id) if e.value is not None]
        return _remainders(set_here[0], loop) if len(set_here) == 1 else []
    return [
        each.right
        for each in ast.walk(test)
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)
    ]


def _of_loop(loop: ast.AST, backward: Backward) -> ast.expr | None:
    """``n`` of ``for _ in range(n)``; ``len(parts)`` where that is a list."""
    over = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else None
    match over:
        case ast.Call(func=ast.Name(id="range"), args=[number]):
            return number
        case ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name() as parts, *_]):
            return _length(parts, backward)
        case ast.Name():
            return _length(over, backward)
        case _:
            return None


def _length(parts: ast.Name, backward: Backward) -> ast.expr | None:
    made = assignments(scope_of(backward.module, backward.node), parts.id)
    is_list = len(made) == 1 and _is_list(made[0].value)
    return ast.Call(ast.Name("len", ast.Load()), [parts], []) if is_list else None


def _is_count(number: ast.expr) -> bool:
    """Whether an expression may be written twice: a number, a name, a setting, ``len(parts)``."""
    match number:
        case ast.Constant(value=value):
            return isinstance(value, int)
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=args, keywords=[]):
            return bool(dotted(owner)) and all(isinstance(each, ast.Constant) for each in args)
        case _:
            return bool(dotted(number))


def _is_list(value: ast.expr | None) -> bool:
    match value:
        case ast.List() | ast.ListComp():
            return True
        case ast.Call(func=ast.Name(id="list") | ast.Attribute(attr="chunk" | "split")):
            return True
        case _:
            return False


def _mistake(backward: Backward | Managed, edits: tuple[Edit, ...]) -> Mistake:
    return Mistake(
        backward.node,
        backward.module,
        "gradients of several micro-batches add up, and the loss is not divided by their number: "
        "the gradient is that many times too large (SGD's step with it, and clipping is that much "
        "stricter), and in float16 overflows that much sooner; divide the loss by the number of "
        "micro-batches (or weight it by samples) before backward",
        edits,
    )
