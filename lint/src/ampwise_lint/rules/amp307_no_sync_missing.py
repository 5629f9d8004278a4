"""# no-sync-missing

## What it does
Reports backward on the micro-batches of an accumulation window under DistributedDataParallel,
in a file that nowhere uses `no_sync()` or `require_backward_grad_sync`, nor calls in its loop what
does; one finding for each loop. Silent where it trains by `model.module`, which goes past the
wrapper, and for a copy of the network that ends with its function.

## Why is this bad
DistributedDataParallel all-reduces gradients in every backward. Over a window of 8
micro-batches that is 8 all-reduces of the whole network where one is enough; the result is the
same.

## Example
    for i, batch in enumerate(loader):
        scaler.scale(loss_of(batch) / 8).backward()
        if (i + 1) % 8 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Use instead
    for i, batch in enumerate(loader):
        last = (i + 1) % 8 == 0
        with nullcontext() if last else model.no_sync():
            scaler.scale(loss_of(batch) / 8).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

## Fix safety
No automatic fix: the forward pass has to be inside `no_sync()` as well, and the last window may
be short.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.precision import is_scaled, uses_amp
from ampwise_lint.queries.windows import accumulates, zeroed_with
from ampwise_lint.queries.wrappers import given_in_parts, is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import assignments, is_inside, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Instance, Model
from ampwise_lint.values.events import Event, Forward, NoSync, Site


@rule("AMP307", "no-sync-missing", "info", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    found: dict[object, Site] = {}
    kept = {id(e.node) for each in code.of(NoSync) for e in each.context.loops}
    for trace in code.traces:
        if not any(map(_is_parallel, trace.of(Forward))):
            continue
        for event in _micro_batches(trace):
            if _is_handled(code.module) or _is_handled(event.module):
                continue
            loops = event.context.loops[-1:]
            if any(id(each.node) in kept for each in loops):
                continue
            # The same loss with and without scaling, in two branches, is one mistake.
            around = [id(each.node) for each in loops] or event.context.functions[-1:]
            place = (id(event.module), *around)
            if place not in found or is_scaled(getattr(event, "scaled", None)):
                found[place] = _in_its_loop(event)
    for site in found.values():
        yield Mistake(
            site.node,
            site.module,
            "every micro-batch averages gradients over all processes, though only the last one of "
            "the window needs it: as many all-reduces as micro-batches; run the others under "
            "model.no_sync()",
        )


def _in_its_loop(event: Event) -> Site:
    """Where the loop over micro-batches runs backward, or calls what does."""
    own = event.site
    loops = event.context.loops[-1:]
    for each in (*event.context.sites, own):
        if any(is_inside(each.module, each.node, loop.node) for loop in loops):
            return each
    return own


def _is_parallel(event: Forward) -> bool:
    """Whether a forward to train on goes through the wrapper, which only then reduces gradients."""
    network = event.model
    if not isinstance(network, Model | Instance) or network.wrapped != "ddp":
        return False
    if event.context.no_grad:
        return False
    name = dotted(getattr(event.node, "func", event.node))
    made = assignments(scope_of(event.module, event.node), name)
    return "module" not in name.split(".") and not (made and all(map(_unwraps, made)))


def _unwraps(made: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    """``inner = model.module``, perhaps only where it is wrapped."""
    parts = ast.walk(made.value) if made.value is not None else ()
    return any(isinstance(each, ast.Attribute) and each.attr == "module" for each in parts)


def _micro_batches(trace: Trace) -> Iterator[Event]:
    """Each backward of part of a window."""
    if not is_managed(trace):
        # What is zeroed each time, as an adversary's gradients, nobody waits to step on.
        yield from (e for e, _ in accumulates(trace) if not any(zeroed_with(trace, e)))
    yield from (event for event, _ in given_in_parts(trace))


def _is_handled(module: Module) -> bool:
    """Whether synchronisation is switched anywhere in the file."""
    methods = {name for used in module.roles.methods.values() for name in used}
    return bool(methods & {"no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"})
