"""# mixed-autocast-dtypes

## What it does
Reports an autocast region in another low dtype than an earlier one of the same training step,
nested or side by side, and one in which a network is evaluated that is trained in the other.
Silent for other networks without gradients, for islands with autocast off, and where the path that
evaluates in one dtype trains in it, or in float32.

## Why is this bad
Values are rounded to both formats: bfloat16 keeps 8 bits, and float16 ends at 65504, so a
bfloat16 activation of 1e5 is inf in the float16 part. Only the float16 part needs the loss
scale.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        code = encoder(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(decoder(code), y)

## Use instead
    with torch.autocast("cuda", dtype=torch.bfloat16):
        code = encoder(x)
        loss = criterion(decoder(code), y)

## Fix safety
No automatic fix: which of the two dtypes is meant, only the author knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Region, key_of
from ampwise_lint.values.events import Backward, Enter, Forward


@rule("AMP208", "mixed-autocast-dtypes", "warning", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    yield from _in_a_step(code)
    yield from _in_evaluation(code)


def _in_a_step(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        if not trace.of(Backward):
            continue
        first: dict[int, Enter] = {}
        for event in trace.of(Enter):
            if event.region.dtype is None or not event.context.loops or event.context.no_grad:
                continue
            serial = event.context.loops[-1].serial
            beside = first.setdefault(serial, event).region
            for other in (beside, *event.context.regions[-2:-1]):
                if _is_in_another_dtype(other, event.region):
                    yield _mistake(event, other)
                    break


def _is_in_another_dtype(one: Region, other: Region) -> bool:
    """Whether both are on, on one device, and not in the same dtype."""
    known = one.enabled and one.dtype is not None and one.device == other.device
    return known and one.dtype != other.dtype


def _mistake(event: Enter, other: Region) -> Mistake:
    where = f"line {other.node.lineno}"
    if other.module is not event.module:
        where = f"{other.module.path.name}, {where}"
    return Mistake(
        event.node,
        event.module,
        f"one step runs autocast in {other.dtype} ({where}) and in {event.region.dtype}: values "
        "are rounded to both formats, and the loss scale fits only one of them; use one dtype",
    )


def _in_evaluation(code: Analysis) -> Iterator[Mistake]:
    """Regions without gradients, of networks that learn in another dtype only.

    On the same path, if they learn on it: where options choose the dtype, others have another one.
    """
    everywhere = _learns(code.traces)
    for trace in code.traces:
        here = _learns([trace])
        for each in trace.of(Forward):
            region, network = each.context.region, key_of(each.model)
            learns = here.get(network) or everywhere.get(network, {None})
            if not each.is_root or not each.context.no_grad or region is None:
                continue
            if region.dtype and not learns & {region.dtype, None}:
                yield Mistake(
                    region.node,
                    region.module,
                    f"the network is trained in {min(map(str, learns))} and evaluated in "
                    f"{region.dtype}: its figures are those of another precision; use one dtype",
                )


def _learns(traces: list[Trace]) -> dict[str, set[str | None]]:
    """The dtypes that networks learn in on some paths; None where that is not known, or whole."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for trace in traces:
        for each in trace.of(Forward):
            if each.is_root and not each.context.no_grad and each.training is not False:
                region = each.context.region
                found[key_of(each.model)].add(None if region is None else region.dtype)
    return found
