"""# forward-outside-autocast

## What it does
Reports the training forward of one network outside autocast, in a step that runs another network
inside it. Silent for a region that is switched off on purpose (`enabled=False`), and for networks
that no optimizer in sight trains.

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
from ampwise_lint.queries import is_managed, owners
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.roles import LOSS
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Optimizer, key_of
from ampwise_lint.values.events import Backward, Forward, OptimizerStep, ScalerStep


@rule("AMP222", "forward-outside-autocast", "warning", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    covered = {
        id(each.node) for trace in code.traces for each in trace.of(Forward) if each.context.regions
    }
    for trace in code.traces:
        if is_managed(trace):
            continue
        trained = _trained(trace)
        inside = [each for each in _forwards(trace) if each.context.region is not None]
        both = {key_of(each.model) for each in inside}
        for event in _forwards(trace):
            key = key_of(event.model)
            if (
                key in both
                or event.context.regions
                or id(event.node) in covered
                or key not in trained
            ):
                continue
            if _is_a_look(event, trace) or LOSS.search(key):
                continue
            if any(_is_beside(each, event) for each in inside):
                yield Mistake(
                    event.node,
                    event.module,
                    "this network's forward runs in float32, another's of the same step in "
                    "autocast: move it into the block, or say enabled=False around it",
                )


def _forwards(trace: Trace) -> Iterator[Forward]:
    """Forward passes of networks that learn, in a loop."""
    for each in trace.of(Forward):
        learns = each.training is not False and not each.context.no_grad
        if learns and each.is_root and each.context.loops:
            yield each


def _is_a_look(event: Forward, trace: Trace) -> bool:
    """Whether it makes a picture every so many steps: no backward stands in its branch."""
    looks = {id(each.node) for each in event.context.branches if each.periodic}
    learns = {id(each.node) for e in trace.of(Backward) for each in e.context.branches}
    return bool(looks - learns)


def _trained(trace: Trace) -> set[str]:
    steps = [*trace.of(ScalerStep), *trace.of(OptimizerStep)]
    found = [owners(each.optimizer) for each in steps if isinstance(each.optimizer, Optimizer)]
    return set[str]().union(*found)


def _is_beside(inside: Forward, outside: Forward) -> bool:
    """Whether two networks run in the same iteration."""
    return inside.context.loops[-1].serial == outside.context.loops[-1].serial
