"""# zero-grad-misplaced

## What it does
Reports gradients that are zeroed between backward and step, zeroed on every micro-batch of an
accumulation window or before its last one, or never zeroed at all; also those of one of several
networks that share a step, between its backward and that step, by the network or by the optimizer
they share. In `with accelerator.accumulate(...)` also before backward: Accelerate zeroes in the
last micro-batch only. Silent between backward and step in a branch that gives the step up: for
gradients that are not finite, or one that leaves the iteration.

## Why is this bad
Zeroed before the step, there is nothing to apply: AssertionError "No inf checks were recorded
for this optimizer." (with a fused optimizer it is `update()` that raises). Zeroed inside a
window of 8, only the last micro-batch counts. Never zeroed, each step applies the sum of all
batches so far. A scaler divides that sum by the scale on every step, so earlier gradients count for
little, but an inf stays in it: from the first one on, every step is skipped.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: where zeroing belongs depends on the window that is meant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.branches import is_of_fault
from ampwise_lint.queries.edits import is_of_each
from ampwise_lint.queries.owners import owners, same_owner
from ampwise_lint.queries.precision import uses_amp
from ampwise_lint.queries.windows import accumulates, gives_up, zeroed_with
from ampwise_lint.queries.wrappers import is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import ACCUMULATES
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, SCALER
from ampwise_lint.values.abstract import Instance, Model, Optimizer, Parameter, Tensor, key_of
from ampwise_lint.values.contents import origins
from ampwise_lint.values.events import (
    Backward,
    Event,
    Forward,
    Loop,
    OptimizerStep,
    ScalerStep,
    ZeroGrad,
)


@rule("AMP113", "zero-grad-misplaced", "error", triggers=(SCALER, AUTOCAST))
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    yield from _before_accumulated(code)
    never: dict[int, ScalerStep | OptimizerStep] = {}
    zeroed: set[int] = set()
    for trace in code.traces:
        if is_managed(trace):
            return
        yield from _before_step(trace)
        yield from _lost(trace)
        yield from _lost_part(trace)
        yield from _inside_window(trace)
        yield from _before_last(trace)
        for step in trace.events:
            if isinstance(step, ScalerStep | OptimizerStep) and _is_plain(trace, step):
                if any(_may_zero(step, each) for each in trace.of(ZeroGrad)):
                    zeroed.add(id(step.node))
                else:
                    never.setdefault(id(step.node), step)
    for place, step in never.items():
        if place not in zeroed and not code.any(ZeroGrad, partial(_may_zero, step)):
            yield Mistake(
                step.node,
                step.module,
                f"gradients are never zeroed: {NEVER[type(step)]}; call optimizer.zero_grad() "
                "before each backward (or behind each step)",
            )


NEVER = {
    OptimizerStep: "each step adds those of all earlier ones",
    ScalerStep: "from the first inf on, which stays in them, the scaler skips every step (what "
    "else is left of earlier ones it divides by the scale each time)",
}


def _before_accumulated(code: Analysis) -> Iterator[Mistake]:
    """Zeroed before backward in ``with accelerator.accumulate(model):``.

    Inside of it Accelerate's optimizer zeroes only in the last micro-batch of a window, as it steps
    only there.
    """
    walked = [each.module for trace in code.traces for each in trace.events]
    modules = {id(each): each for each in (code.module, *walked)}.values()
    calls = [call for module in modules for call in module.index.of(ast.Call)]
    windows = [each for call in calls for each in _windows(call)]
    if any(not isinstance(each, ast.Constant) or each.value != 1 for each in windows):
        for module in modules:
            yield from _zeroed_in_window(module)


def _zeroed_in_window(module: Module) -> Iterator[Mistake]:
    for block in module.index.of(ast.With):
        if not isinstance(block, ast.With) or not any(_accumulates(e) for e in block.items):
            continue
        calls = [each for each in ast.walk(block) if isinstance(each, ast.Call)]
        calls.sort(key=lambda each: (each.lineno, each.col_offset))
        named = [(dotted(e.func).rpartition(".")[2], e) for e in calls]
        order = [(name, e) for name, e in named if name in ("zero_grad", "backward", "step")]
        if [name for name, _ in order][:2] == ["zero_grad", "backward"]:
            yield Mistake(
                order[0][1],
                module,
                "inside accumulate() gradients are zeroed in the last micro-batch of a window "
                "only, and here before its backward: those of all others are lost; zero them "
                "behind the step",
            )


def _windows(call: ast.AST) -> Iterator[ast.expr]:
    """How many micro-batches a call says that a window has."""
    for each in call.keywords if isinstance(call, ast.Call) else []:
        if each.arg in ACCUMULATES:
            yield each.value


def _accumulates(item: ast.withitem) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and dotted(call.func).endswith(".accumulate")


def _is_plain(trace: Trace, step: Event) -> bool:
    loops = step.context.loops
    return bool(loops) and any(
        each.context.loops and each.context.loops[-1].node is loops[-1].node
        for each in trace.of(Backward)
    )


def _may_zero(step: ScalerStep | OptimizerStep, zero: ZeroGrad) -> bool:
    """Whether gradients that a step takes are zeroed, for all that is known."""
    own, other = step.optimizer, zero.of
    if is_of_each(step) or is_of_each(zero) or own is other:
        return True
    made = isinstance(own, Optimizer) and isinstance(other, Optimizer) and own.path and other.path
    return not made or same_owner(own, other) is not False


def _before_step(trace: Trace) -> Iterator[Mistake]:
    """Zeroed between the only backward and the step."""
    for index, event in enumerate(trace.events):
        if not isinstance(event, ZeroGrad) or isinstance(event.of, Parameter):
            continue
        before = _last(trace.events[:index])
        after = next(
            (
                e
                for e in trace.events[index + 1 :]
                if isinstance(e, Backward | ScalerStep | OptimizerStep)
            ),
            None,
        )
        if not isinstance(before, Backward) or not isinstance(after, ScalerStep | OptimizerStep):
            continue
        if not event.context.loops or before.context.loops[-1:] != after.context.loops[-1:]:
            continue
        if _same(event, after) and not gives_up(event, before) and not is_of_fault(event):
            yield Mistake(
                event.node,
                event.module,
                "gradients are zeroed between backward and step: the step applies nothing (with a "
                "scaler it raises: no inf checks); zero them before backward or behind the step",
            )


def _lost(trace: Trace) -> Iterator[Mistake]:
    """One of several networks' gradients, zeroed between its backward and the shared step."""
    for index, event in enumerate(trace.events):
        if not isinstance(event, ZeroGrad) or not isinstance(event.of, Model | Instance):
            continue
        key = key_of(event.of)
        outputs = _outputs(trace, event, key)
        later = _until_step(trace, index)
        step = later[-1] if later else None
        if not outputs or not isinstance(step, ScalerStep | OptimizerStep):
            continue
        before = [e for e in _since_step(trace, index) if _is_of(e, outputs)]
        others = [each for each in later if isinstance(each, Backward)]
        if (
            before
            and others
            and key in owners(step.optimizer)
            and not any(_is_of(each, outputs) for each in others)
        ):
            yield Mistake(
                event.node,
                event.module,
                "the gradients of this network are zeroed between its backward and the step it "
                "shares with others: it never trains; zero them before the first backward",
            )


def _lost_part(trace: Trace) -> Iterator[Mistake]:
    """The same by the optimizer they share: ``backward``, ``zero_grad``, ``backward``, ``step``.

    Only where each backward goes through networks of its own: a generator's goes through the
    discriminators as well, whose gradients of it nobody wants.
    """
    for index, event in enumerate(trace.events):
        if not isinstance(event, ZeroGrad) or not isinstance(event.of, Optimizer):
            continue
        later = _until_step(trace, index)
        step = later[-1] if later else None
        if not isinstance(step, ScalerStep | OptimizerStep) or step.optimizer is not event.of:
            continue
        loops, own = event.context.loops[-1:], owners(event.of)
        lost = _networks(trace, _since_zeroed(trace, index, event.of), loops) & own
        kept = _networks(trace, later, loops) & own
        if loops and lost and kept and not lost & kept and step.context.loops[-1:] == loops:
            yield Mistake(
                event.node,
                event.module,
                "gradients that an earlier backward left for the step of this optimizer are zeroed "
                "before it: the network they belong to never trains; zero them before the first "
                "backward",
            )


def _since_zeroed(trace: Trace, index: int, optimizer: Optimizer) -> list[Event]:
    """What happened since an optimizer's gradients were zeroed, and since the last step."""
    found: list[Event] = []
    for event in _since_step(trace, index):
        if isinstance(event, ZeroGrad) and event.of is optimizer:
            break
        found.append(event)
    return found


def _networks(trace: Trace, events: list[Event], loops: tuple[Loop, ...]) -> set[str]:
    """The networks that some backward passes of an iteration go through, by key."""
    losses = [e.tensor for e in events if isinstance(e, Backward) and e.context.loops[-1:] == loops]
    nodes = {id(each.node) for each in origins(*losses)}
    return {
        key_of(each.model)
        for each in trace.of(Forward)
        if id(each.node) in nodes and each.context.loops[-1:] == loops
    }


def _outputs(trace: Trace, zero: ZeroGrad, key: str) -> set[int]:
    """The calls of a network in an iteration, by ``id``."""
    loops = zero.context.loops[-1:]
    return {
        id(each.node)
        for each in trace.of(Forward)
        if key_of(each.model) == key and each.context.loops[-1:] == loops != ()
    }


def _since_step(trace: Trace, index: int) -> list[Event]:
    """What happened since the last step."""
    found: list[Event] = []
    for event in reversed(trace.events[:index]):
        if isinstance(event, ScalerStep | OptimizerStep):
            break
        found.append(event)
    return found


def _until_step(trace: Trace, index: int) -> list[Event]:
    """What happens up to the next step, that included."""
    found: list[Event] = []
    for event in trace.events[index + 1 :]:
        found.append(event)
        if isinstance(event, ScalerStep | OptimizerStep):
            break
    return found


def _is_of(event: Event, outputs: set[int]) -> bool:
    """Whether a backward goes through one of these calls."""
    if not isinstance(event, Backward) or not isinstance(event.tensor, Tensor):
        return False
    return any(id(each.node) in outputs for each in origins(event.tensor))


def _same(zero: ZeroGrad, step: ScalerStep | OptimizerStep) -> bool:
    """Whether all that a step takes is zeroed, not the gradient of one tensor: ``gate.grad``."""
    if _is_of_a_tensor(zero.node) and not isinstance(zero.of, Parameter):
        return False
    if isinstance(zero.of, Optimizer):
        return zero.of is step.optimizer
    return same_owner(zero.of, step.optimizer) is True


def _is_of_a_tensor(node: ast.AST) -> bool:
    """``x.grad = None``, ``x.grad.zero_()``."""
    match node:
        case ast.Attribute(attr="grad"):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="grad"))):
            return True
        case _:
            return False


def _last(events: list[Event]) -> Event | None:
    return next(
        (e for e in reversed(events) if isinstance(e, Backward | ScalerStep | OptimizerStep)), None
    )


def _inside_window(trace: Trace) -> Iterator[Mistake]:
    """Zeroed on every micro-batch of a window."""
    for backward, step in accumulates(trace):
        for event in zeroed_with(trace, backward):
            if _same(event, step):
                yield Mistake(
                    event.node,
                    event.module,
                    "gradients are zeroed on every micro-batch, but the step waits for the end of "
                    "the window: only the last micro-batch counts; zero them behind the step",
                )


def _before_last(trace: Trace) -> Iterator[Mistake]:
    """Zeroed in front of a window's last backward, under the very condition of the step."""
    for backward, step in accumulates(trace):
        held = {each.key for each in step.context.conditions if each.periodic}
        again = [e for e in trace.of(Backward) if e.node is backward.node and _beside(e, step)]
        for event in trace.of(ZeroGrad):
            together = any(each.key in held for each in event.context.conditions if each.taken)
            if not together or not _beside(event, step) or not _same(event, step):
                continue
            if again and _in_order(trace, event, again[-1], step):
                yield Mistake(
                    event.node,
                    event.module,
                    "gradients are zeroed right before the last backward of a window, under the "
                    "condition of the step: only that micro-batch counts; zero them behind the "
                    "step",
                )


def _beside(event: Event, step: Event) -> bool:
    """Whether it happens in the iteration of a step."""
    return event.context.loops[-1:] == step.context.loops[-1:]


def _in_order(trace: Trace, *events: Event) -> bool:
    places = [trace.events.index(each) for each in events]
    return places == sorted(places)
