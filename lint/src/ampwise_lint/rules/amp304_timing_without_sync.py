"""# timing-without-sync

## What it does
Reports a time taken in a training loop in mixed precision, or of a network in autocast, around work
on the device, with no synchronize, event or read value before the clock is read the second time.
`scaler.step` of an optimizer that is not fused reads found_inf, and so waits, too, as does the step
behind `backward` of a trainer that may scale; one from elsewhere is taken for such. What is read
now and then, to be logged, is no wait; a tokenizer that makes a text of ids is one. Silent for a
time over many steps each of which waits somewhere: little of the last one is still queued.

## Why is this bad
Calls to CUDA return when work is queued. The difference is the time of queuing, not of
computing: a comparison of float32 with 16 bits compares how fast Python queues the two.

## Example
    start = time.perf_counter()
    train_step(x, y)
    seconds = time.perf_counter() - start

## Use instead
    torch.cuda.synchronize()
    start = time.perf_counter()
    train_step(x, y)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start

## Fix safety
No automatic fix: CUDA events, or a block of steps with one synchronize, disturb the measurement
less.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.precision import uses_amp
from ampwise_lint.queries.steps import step_loops
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.frequency import SETTING
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import FALSE, Const, Optimizer, Value, Wrapper
from ampwise_lint.values.events import (
    Backward,
    Elapsed,
    Event,
    Forward,
    HostSync,
    OptimizerStep,
    ScalerStep,
    Synchronize,
)


@rule("AMP304", "timing-without-sync", "warning", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    loops = step_loops(code)
    waited = {
        id(each.node)
        for trace in code.traces
        for each in trace.of(Elapsed)
        if _waits(trace.events[each.begin : each.end])
    }
    for trace in code.traces:
        for event in trace.of(Elapsed):
            if id(event.node) in waited:
                continue  # on some path it waits: where there is a device, or lower precision
            begun = trace.events[event.begin - 1].context.loops[-1:]
            timed = trace.events[event.begin : event.end]
            of_step = not event.context.no_grad and any(
                id(each.node) in loops.nodes and loops.is_lower(trace, each)
                for each in event.context.loops
            )
            inside = of_step or _times_forward(event, timed)
            # Over a whole epoch, what is still queued at its end does not count.
            always = [each for each in timed if not _is_perhaps(each, event, trace)]
            if not inside or begun != event.context.loops[-1:] or not _ends_at_work(always):
                continue
            if not (_spans_steps(event, trace) and any(map(_is_wait, always))):
                yield _mistake(trace.events[event.end - 1])


def _spans_steps(event: Elapsed, trace: Trace) -> bool:
    """Whether the clock was started in an earlier step: in a branch for some of them alone."""
    started = trace.events[event.begin - 1].context
    held = {(each.asked, each.taken) for each in event.context.conditions}
    return any((each.asked, each.taken) not in held for each in started.branches)


def _is_perhaps(event: Event, elapsed: Elapsed, trace: Trace) -> bool:
    """Whether the host waits, or a network runs, there now and then only, in a branch."""
    held = {id(each.node) for each in elapsed.context.conditions}
    branches = [e for e in event.context.conditions if id(e.node) not in held and not e.known]
    if isinstance(event, Forward):
        return any(each.periodic for each in branches)
    return isinstance(event, HostSync) and any(
        each.key not in trace.decided
        and isinstance(each.node, ast.If)
        and (each.periodic or NOW_AND_THEN.search(ast.unparse(each.node.test)))
        for each in branches
    )


NOW_AND_THEN = re.compile(rf"{SETTING.pattern}|save|writer|(^|[^a-z])log(_|\b)")
"""What a branch asks for that reports, or keeps, something."""


def _times_forward(event: Elapsed, timed: list[Event]) -> bool:
    """Whether a network runs in it in autocast, each time round a loop that is none over epochs."""
    loops = event.context.loops
    epoch = any(isinstance(e, Backward) and len(e.context.loops) > len(loops) for e in timed)
    return (
        bool(loops)
        and not epoch
        and any(
            isinstance(each, Forward)
            and each.is_root
            and each.context.region is not None
            and each.context.loops == loops
            for each in timed
        )
    )


def _waits(events: list[Event]) -> bool:
    """Whether the device is waited for by a call that does nothing else, or by a scaler's step."""
    waits = any(isinstance(each, Synchronize | ScalerStep) for each in events)
    return waits and not _ends_at_work(events)


def _ends_at_work(events: list[Event]) -> bool:
    """Whether the device was given work that nobody has waited for.

    Where somebody has waited behind backward, the update alone is missing: a small part of a step.
    """
    updates = waits = False
    for event in reversed(events):
        if _is_wait(event):
            return False
        match event:
            case ScalerStep():
                updates = True
            case OptimizerStep(optimizer=optimizer):
                updates, waits = True, _reads_found_inf(optimizer)
            case Backward(scaled=Wrapper() as trainer) if waits and _may_scale(trainer):
                return False
            case Forward() | Backward():
                return True
            case _:
                pass
    return updates


def _is_wait(event: Event) -> bool:
    """Whether the host waits there until the device has done what it was given."""
    match event:
        case HostSync() | Synchronize():
            return True
        case ScalerStep(optimizer=optimizer):
            return _reads_found_inf(optimizer)
        case _:
            return False


def _reads_found_inf(optimizer: Value | None) -> bool:
    """Whether the scaler's step waits itself: but for a fused one, of whatever class.

    What an optimizer from elsewhere is like nobody tells; hardly one of them is fused.
    """
    if not isinstance(optimizer, Optimizer):
        return True
    if "**" in optimizer.arguments:
        return False
    # Apex's fused ones take found_inf on the device only where they are captured in graphs.
    fused = optimizer.arguments.get("capturable" if "Fused" in optimizer.path else "fused", FALSE)
    return isinstance(fused, Const) and not fused.value


def _may_scale(trainer: Wrapper) -> bool:
    """Whether the step behind it may be that of a scaler, which a trainer puts into optimizers."""
    return not trainer.off and trainer.mixed != "bfloat16"


def _mistake(event: Event) -> Mistake:
    return Mistake(
        event.node,
        event.module,
        "the clock is read while the device still works: calls return at once, so this measures "
        "how fast work is queued, not done; call torch.cuda.synchronize() before reading the "
        "clock, or use CUDA events",
    )
