"""What runs once a step of training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.branches import is_of_evaluation, is_rare, is_trial, passed, raises
from ampwise_lint.queries.precision import evaluates, evaluates_by_name, is_by_scaler
from ampwise_lint.queries.wrappers import is_given
from ampwise_lint.source.frequency import SETTING, is_for_most
from ampwise_lint.source.places import is_inside
from ampwise_lint.source.roles import dotted
from ampwise_lint.values.abstract import Wrapper
from ampwise_lint.values.events import (
    Backward,
    Condition,
    Enter,
    Event,
    Forward,
    Loop,
    Made,
    Managed,
    OptimizerStep,
    ScalerStep,
)


@dataclass(slots=True)
class Steps:
    """Where the steps of a file are made."""

    nodes: set[int] = field(default_factory=set[int])
    """``id`` of the innermost loops around each backward, each step and both, and of loops over
    data around."""
    traces: set[int] = field(default_factory=set[int])
    """``id`` of the events of paths through a function that makes a step without a loop."""
    windows: set[int] = field(default_factory=set[int])
    """``id`` of the branches that hold a step, and of those before it that ``continue``: what is
    in them, or behind, happens once a step."""
    waits: set[tuple[str, bool]] = field(default_factory=set[tuple[str, bool]])
    """What those branches ask, and which way they go."""
    always: set[int] = field(default_factory=set[int])
    """``id`` of those of the branches without which no step is made."""
    lower: set[tuple[int, int | None]] = field(default_factory=set[tuple[int, int | None]])
    """``id`` of the events of a path, with those of the loops that train in lower precision on it;
    with None for the path itself."""

    def is_window(self, branch: Condition) -> bool:
        """Whether what is in a branch happens once a step: it holds the step, or asks the same."""
        return id(branch.node) in self.windows or (branch.asked, branch.taken) in self.waits

    def is_lower(self, trace: Trace, loop: Loop | None) -> bool:
        """Whether what a loop, or a path without one, trains is in lower precision there."""
        return (id(trace.events), None if loop is None else id(loop.node)) in self.lower


def step_loops(code: Analysis) -> Steps:
    """Find what runs once a step."""
    found = Steps()
    lower = [e for e in code.of(Made) if isinstance(e.value, Wrapper) and e.value.lower]
    rests = _loops_for_rests(code)
    runs_backward = code.any(Backward, lambda e: isinstance(e.scaled, Wrapper) and e.scaled.lower)
    held: dict[int, set[int]] = {}
    for trace in code.traces:
        # Where a trainer runs backward on another path, this one does without it.
        is_plain = runs_backward and not any(each.scaled for each in trace.of(Backward))
        by_trainer = any(not _is_of_relative(each, trace) for each in lower)
        is_told = by_trainer and not (is_plain and trace.of(Backward))
        backward: tuple[Loop, ...] = ()
        # What only takes gradients, to look at them or to test them, trains nothing.
        steps = any(isinstance(e, ScalerStep | OptimizerStep | Managed) for e in trace.events)
        for event in trace.events:
            if is_told or _is_lower(event):
                around = (None, *(id(each.node) for each in event.context.loops))
                found.lower |= {(id(trace.events), each) for each in around}
            if not _is_of_steps(event, rests):
                continue
            loops = event.context.loops
            if loops and not steps:
                continue
            if isinstance(event, Backward):
                backward = loops
            pairs = zip(loops, backward, strict=False)
            both = takewhile(lambda pair: pair[0].node is pair[1].node, pairs)
            found.nodes |= {id(each.node) for each, _ in [*both][-1:]}
            if loops:
                found.nodes.add(id(loops[-1].node))
                # Of a loop over data sets and one over batches, the inner one makes the steps.
                found.nodes |= {id(each.node) for each in [e for e in loops if e.over_data][-1:]}
            elif trace.root and not trace.root.rpartition(".")[2].startswith("test_"):
                found.traces.add(id(trace.events))
            if not isinstance(event, Backward):
                branches = {id(each.node) for each in event.context.conditions}
                around = id(loops[-1].node) if loops else 0
                held[around] = held.get(around, branches) & branches
                found.windows |= branches
                found.waits |= {(e.asked, e.taken) for e in event.context.conditions}
                inner = loops[-1].node if loops else None
                found.windows |= {id(each) for each in passed(event, inner)}
    found.always = set[int]().union(*held.values())
    return found


def _is_of_relative(event: Made, trace: Trace) -> bool:
    """Whether another class of the same family as the path's own makes it, for its objects alone.

    A class derived from the path's own does, or one that has a base in common with it.
    """
    own, _, method = trace.root.partition(".")
    makers = {each.partition(".")[0] for each in event.context.functions}
    classes = [each for each in event.module.tree.body if isinstance(each, ast.ClassDef)]
    bases = {each.name: {*map(dotted, each.bases)} for each in classes}
    family = {own, *bases.get(own, ())} & bases.keys()
    if not method or makers & family:
        return False
    return any(bases.get(each, set()) & family for each in makers)


def _is_of_steps(event: Event, rests: set[tuple[int, ...]]) -> bool:
    """Whether it is a backward or a step, and none behind the batches of an epoch."""
    if isinstance(event, Backward) or is_given(event):
        return True
    return isinstance(event, ScalerStep | OptimizerStep) and _nodes(event) not in rests


def _loops_for_rests(code: Analysis) -> set[tuple[int, ...]]:
    """Loops over epochs that step on what the last window has left over, behind the batches.

    They make no backward themselves, and a loop inside of them makes the other steps.
    """
    backward = {_nodes(each) for trace in code.traces for each in trace.of(Backward)}
    backward |= {_nodes(e) for trace in code.traces for e in trace.of(Managed) if is_given(e)}
    steps = {
        _nodes(each)
        for trace in code.traces
        for each in (*trace.of(ScalerStep), *trace.of(OptimizerStep))
    }
    return {
        outer
        for outer in steps - backward
        if outer and any(len(e) > len(outer) and e[: len(outer)] == outer for e in steps)
    }


def _nodes(event: Event) -> tuple[int, ...]:
    """``id`` of the loops around something, outermost first."""
    return tuple(id(each.node) for each in event.context.loops)


def _is_lower(event: Event) -> bool:
    """Whether something tells that training is in lower precision where it happens."""
    match event:
        case ScalerStep():
            return True
        case Managed():
            return not event.off
        case Backward(scaled=scaled) if is_by_scaler(scaled):
            return True
        case Enter(region=region):
            return region.enabled and not evaluates(event)
        case Forward() | Backward():
            return event.context.region is not None and not evaluates(event)
        case _:
            return False


def is_hot(event: Event, steps: Steps, trace: Trace) -> bool:
    """Whether something happens on every step of a training loop in lower precision."""
    if event.context.no_grad and not _is_of_step(event, steps, trace):
        return False
    if raises(event) or is_trial(event):
        return False
    conditions = list(event.context.conditions)
    if any(map(is_of_evaluation, conditions)):
        return False
    if any(trace.decided.get(each.key, each.taken) != each.taken for each in conditions):
        return False  # in a branch that the path, as it went on, did not take
    if id(trace.events) in steps.traces:
        # Objects that the step is handed were made before it.
        if any(each.endswith(".__init__") for each in event.context.functions):
            return False
        inner, loop = None, None
    else:
        around = [each for each in event.context.loops if id(each.node) in steps.nodes]
        if not around:
            return False
        inner, loop = around[0], around[0].node
        conditions = event.context.branches_in(around[0])
    if not steps.is_lower(trace, inner):
        return False
    before = [each for each in passed(event, loop) if id(each) not in steps.windows]
    if any(is_for_most(each.test) for each in before):
        return False
    return not any(
        (each.periodic or SETTING.search(each.key) or is_rare(each, loop, event.module))
        and not steps.is_window(each)
        for each in conditions
    )


def _is_of_step(event: Event, steps: Steps, trace: Trace) -> bool:
    """Whether it belongs to a step for all `no_grad`: figures of the batch, no validation."""
    loops = event.context.loops
    while len(loops) > 1 and _is_over_figures(loops[-1], steps, trace):
        loops = loops[:-1]
    inner = [each.node for each in loops[-1:]]
    if any(is_inside(event.module, event.node, each) for each in inner if id(each) in steps.nodes):
        return True
    if not inner and id(trace.events) not in steps.traces:
        return False
    # In functions that the step calls: where one of them validates, it says so.
    return all(id(each) in steps.nodes for each in inner) and not evaluates_by_name(event)


def _is_over_figures(loop: Loop, steps: Steps, trace: Trace) -> bool:
    """Whether a loop inside a step goes over what the step has made, and runs no network."""
    if loop.over_data or id(loop.node) in steps.nodes or not isinstance(loop.node, ast.For):
        return False
    return not any(
        each.serial == loop.serial for event in trace.of(Forward) for each in event.context.loops
    )


def is_always(event: Event, steps: Steps) -> bool:
    """Whether something hot happens on every step, whatever branches are taken."""
    around = [each for each in event.context.loops if id(each.node) in steps.nodes]
    branches = event.context.branches_in(around[0]) if around else event.context.conditions
    return all(each.known or id(each.node) in steps.always for each in branches)


def steps_by_scaler(trace: Trace) -> Iterator[ScalerStep | Managed]:
    """Each step that a scaler makes, or skips: by itself, or inside a wrapper that holds one."""
    for event in trace.events:
        if isinstance(event, ScalerStep) or (isinstance(event, Managed) and event.optimizer):
            yield event


def steps_behind(trace: Trace, event: Event) -> Iterator[ScalerStep | OptimizerStep]:
    """Steps that come after something, also the next time round a loop that both stand in."""
    around = {each.node for each in event.context.loops}
    index = trace.events.index(event)
    for place, step in enumerate(trace.events):
        if isinstance(step, ScalerStep | OptimizerStep):
            again = any(each.node in around for each in step.context.loops)
            if place > index or again:
                yield step
