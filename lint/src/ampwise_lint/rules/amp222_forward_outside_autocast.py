"""# forward-outside-autocast

## What it does
Reports the training forward of one network outside autocast, in a step that runs another network
inside it; under a scaler that one may also be run without gradients, as a copy that follows is.
Silent for a region that is switched off on purpose (`enabled=False`), for an embedding alone, and
for networks that no optimizer in sight trains.

## Why is this bad
The network outside computes in float32: its time and memory are those of full precision, and what
it hands to the other is cast at the border. Mostly a line slipped out of the `with` block; where
float32 is meant, a region with `enabled=False` says so.

## Example
    fake = generator(noise)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(discriminator(fake), real)

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        fake = generator(noise)
        loss = criterion(discriminator(fake), real)

## Fix safety
No automatic fix: what stands between the two may have to stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.owners import owners
from ampwise_lint.queries.steps import steps_by_scaler
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.roles import LOSS
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Model, Optimizer, key_of
from ampwise_lint.values.events import Backward, Forward, Managed, OptimizerStep


@rule("AMP222", "forward-outside-autocast", "warning", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    covered = {
        id(each.node) for trace in code.traces for each in trace.of(Forward) if each.context.regions
    }
    for trace in code.traces:
        if any(each.optimizer is None for each in trace.of(Managed)):
            continue
        trained = _trained(trace)
        scaled = any(True for _ in steps_by_scaler(trace))
        inside = [
            each
            for each in trace.of(Forward)
            if each.context.region is not None and _is_of_step(each) and (scaled or _learns(each))
        ]
        both = {key_of(each.model) for each in inside if _learns(each)}
        for event in trace.of(Forward):
            key = key_of(event.model)
            if not _is_of_step(event) or not _learns(event) or key in both:
                continue
            if event.context.regions or id(event.node) in covered:
                continue
            if isinstance(event.model, Model) and event.model.path == "torch.nn.Embedding":
                continue  # which autocast would not change: it only picks rows
            if not owners(event.model) & trained:
                continue
            if _is_a_look(event, trace) or LOSS.search(key):
                continue
            others = [each for each in inside if key_of(each.model) != key]
            if any(_is_beside(each, event) and not _is_a_look(each, trace) for each in others):
                yield Mistake(
                    event.node,
                    event.module,
                    "this network's forward runs in float32, another's of the same step in "
                    "autocast: move it into the block, or say enabled=False around it",
                )


def _is_of_step(event: Forward) -> bool:
    """Whether a loop runs a network, and no other network does."""
    return event.is_root and bool(event.context.loops)


def _learns(event: Forward) -> bool:
    return event.training is not False and not event.context.no_grad


def _is_a_look(event: Forward, trace: Trace) -> bool:
    """Whether it makes a picture every so many steps: no backward stands in its branch."""
    looks = {id(each.node) for each in event.context.branches if each.periodic}
    steps = [*trace.of(Backward), *steps_by_scaler(trace)]
    learns = {id(each.node) for e in steps for each in e.context.branches}
    return bool(looks - learns)


def _trained(trace: Trace) -> set[str]:
    steps = [*steps_by_scaler(trace), *trace.of(OptimizerStep)]
    found = [owners(each.optimizer) for each in steps if isinstance(each.optimizer, Optimizer)]
    return set[str]().union(*found)


def _is_beside(inside: Forward, outside: Forward) -> bool:
    """Whether two networks run in the same iteration."""
    return inside.context.loops[-1].serial == outside.context.loops[-1].serial
