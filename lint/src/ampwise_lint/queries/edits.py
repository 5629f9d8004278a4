"""Where a finding is placed, and what an edit there is made of."""

from __future__ import annotations

import ast

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Change, Edit
from ampwise_lint.queries.precision import is_real
from ampwise_lint.source.nodes import Node, span
from ampwise_lint.source.places import in_reach, names
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.values.events import (
    Backward,
    Event,
    Forward,
    OptimizerStep,
    ScalerStep,
    Site,
    Unscale,
    Update,
)


def is_of_each(event: Event) -> bool:
    """``for optimizer in optimizers: scaler.step(optimizer)``, or ``optimizers[i]``."""
    loop = event.context.loops[-1].node if event.context.loops else None
    if not isinstance(loop, ast.For):
        return False
    return bool((names(loop.target) - {"self"}) & names(event.node))


def is_simple(trace: Trace) -> bool:
    """Whether an edit of steps is sure to be right: one scaler, steps of optimizers only.

    With several scalers the one that belongs to a backward may be another; a closure, or whatever
    else a step is given, would be lost.
    """
    scalers = {id(e.scaler) for e in trace.events if isinstance(e, ScalerStep | Update | Unscale)}
    scalers |= {id(e.scaled) for e in trace.of(Backward) if is_real(e.scaled)}
    steps = [*trace.of(ScalerStep), *trace.of(OptimizerStep)]
    return len(scalers) <= 1 and all(map(_is_plain, steps))


def _is_plain(step: ScalerStep | OptimizerStep) -> bool:
    """``scaler.step(optimizer)``, ``optimizer.step()``: no closure, receivers that are names."""
    node = step.node
    if not isinstance(node, ast.Call) or node.keywords or not receiver(node):
        return False
    wanted = 1 if isinstance(step, ScalerStep) else 0
    return len(node.args) == wanted and not any(isinstance(e, ast.Starred) for e in node.args)


def site_in(event: Event, module: Module) -> Site:
    """Where something happens as seen from a file: the call that leads there from it, if one does.

    A helper in a file of its own that does what it is told to is called wrongly, not wrong; what
    the file that is judged defines, for a base class to call, is what it can change.
    """
    context = event.context
    judged = context.sites[0].module if context.sites else module
    if event.module is not module and event.module is not judged:
        for each in reversed(context.sites):
            if each.module is module:
                return each
    return event.site


def left_autocast(event: Event, trace: Trace) -> Site:
    """Where what a network returned leaves its function for the helper in which something happens.

    That is where the call of the helper can be moved into autocast, or its input cast; what the
    file itself does, or the one whose class is judged, is told where it happens.
    """
    if event.module is event.way[0].module:
        return event.site
    before = trace.events[: trace.events.index(event)]
    ran = next((e for e in reversed(before) if isinstance(e, Forward) and e.is_root), event)
    around = ran.context.functions
    shared = (e for e in reversed(event.way) if e.functions == around[: len(e.functions)])
    site = next(shared, event.site)
    return event.site if site.module is event.module else site


def file_of(node: ast.AST, event: Event, code: Analysis) -> Module | None:
    """The file a node stands in: that of an event, or one on the way to it."""
    ways = [event.module, *(each.module for each in event.context.sites), code.module]
    return next((each for each in ways if each.holds(node)), None)


def edit(what: Change, node: Node, text: str = "") -> Edit:
    """A change at a node."""
    return Edit(what, *span(node), text, node)


def statement_edit(what: Change, module: Module, node: Node, text: str = "") -> Edit:
    """A change at the statement a node stands in."""
    return edit(what, module.statement_of(node), text)


def receiver(node: ast.AST) -> str:
    """``scaler`` of ``scaler.step(optimizer)``, as text; empty for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return dotted(node.func.value)
    return ""


def is_known_at(module: Module, call: ast.AST, at: ast.AST) -> bool:
    """Whether the receiver of a method's call means the same at another place of the file."""
    return isinstance(call, ast.Call) and in_reach(module, call.func, at)


def first_argument(node: ast.AST) -> str:
    """The first argument of a call, as text."""
    if isinstance(node, ast.Call) and node.args:
        return ast.unparse(node.args[0])
    return ""
