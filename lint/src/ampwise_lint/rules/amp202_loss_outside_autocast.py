"""# loss-outside-autocast

## What it does
Reports a loss computed outside autocast on the 16-bit output of a network that ran inside it,
with no `.float()` in between; also one that is written by hand (the KL divergence of a VAE, `p *
(p.log() - q.log())`), and inside `autocast(enabled=False)`, which by itself casts nothing up.
Silent for what runs in the `autocast()` of Accelerate or Fabric, whose networks return float32; for
`mse_loss`, `l1_loss` and `smooth_l1_loss` against a float32 target: they promote; and for what a
network is given and returns with more in it (`batch = model(batch)`).

## Why is this bad
Inside autocast losses run in float32; outside they take the dtype of their inputs. In float16,
`mse_loss` of an error of 300 is inf (300 squared is above 65504), `cross_entropy` with
`reduction="sum"` over 32768 tokens of 50 equally likely classes is inf, and every loss keeps 11
bits.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x)
    loss = F.cross_entropy(output, y)
    scaler.scale(loss).backward()

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x)
        loss = F.cross_entropy(output, y)
    scaler.scale(loss).backward()

## Fix safety
Unsafe: `--unsafe-fixes` casts the half output up (`logits.float()`); moving the loss into the
region is as right, and differs in memory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit, left_autocast
from ampwise_lint.queries.precision import evaluates, is_half_output, losses_by_hand
from ampwise_lint.queries.wrappers import is_given
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import LOSS_FUNCTIONS, MOVES
from ampwise_lint.source.places import grouped
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Tensor, Value, is_low
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import Backward, Loss, Op

PROMOTE = {"mse_loss", "l1_loss", "smooth_l1_loss"}
"""Losses that run in the wider dtype of output and target."""


@rule("AMP202", "loss-outside-autocast", "warning", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        if not trace.of(Backward) and not any(map(is_given, trace.events)):
            continue
        seen: set[int] = set()
        found = [
            (event, half)
            for event in trace.of(Loss)
            if (half := _half(event)) is not None and _computes_in_half(event, trace)
        ]
        calls = {id(event.node) for event, _ in found}
        for event, half in found:
            seen.add(id(event.module.statement_of(event.node)))
            # What a loss of the project computes with is mended where that is called.
            if calls.isdisjoint(id(each.node) for each in event.context.sites):
                yield Mistake(
                    event.node,
                    event.module,
                    "the network ran in autocast and the loss is computed outside it on its "
                    "half-precision output: softmax, log and sums of the loss run in half "
                    "precision; compute the loss inside autocast, or on output.float()",
                    _edits(event, half),
                )
        yield from _by_hand(trace, seen, calls)


def _half(event: Loss) -> Tensor | None:
    """What a network in autocast returned, and a loss outside it computes with in 16 bits."""
    if event.context.region is not None or evaluates(event):
        return None
    if event.context.regions and event.path not in LOSS_FUNCTIONS:
        return None  # a function that is called with autocast switched off may cast by itself
    given = flatten(event.inputs)
    if event.path in PROMOTE and any(map(_is_wider, given)):
        return None
    # Of what was copied to the host figures are made, no losses that are trained on.
    return next(
        (e for e in given if isinstance(e, Tensor) and not e.host and is_half_output(e)), None
    )


def _is_wider(value: Value) -> bool:
    """Whether it is float32, as what a network outside autocast returns mostly is."""
    if not isinstance(value, Tensor):
        return False
    is_plain = value.forward and value.region is None and value.dtype is None
    return is_plain or value.dtype == "float32"


def _computes_in_half(event: Loss, trace: Trace) -> bool:
    """Whether a loss does so, as far as it is in sight."""
    inside = [
        each
        for each in trace.events
        if isinstance(each, Op | Loss) and any(e.node is event.node for e in each.context.sites)
    ]
    return not inside or any(map(_is_in_half, inside))


def _is_in_half(event: Op | Loss) -> bool:
    """Whether it computes with, or gives, a number of 16 bits."""
    if isinstance(event, Loss):
        return _half(event) is not None
    made = event.result
    return event.path not in MOVES and isinstance(made, Tensor) and is_low(made.dtype)


def _by_hand(trace: Trace, seen: set[int], calls: set[int]) -> Iterator[Mistake]:
    """A loss written as an expression, once a statement, unless that is reported already.

    `calls`: those of losses that are reported, in whose bodies nothing is reported again.
    """
    for event in losses_by_hand(trace):
        statement = id(event.module.statement_of(event.node))
        is_inside = not calls.isdisjoint(id(each.node) for each in event.context.sites)
        if statement not in seen and not is_inside:
            seen.add(statement)
            site = left_autocast(event, trace)
            yield Mistake(
                site.node,
                site.module,
                f"the network ran in autocast and {event.path} of its half-precision output runs "
                "outside it, in half precision, as part of the loss; compute the loss inside "
                "autocast, or on output.float()",
            )


def _edits(event: Loss, half: Value) -> tuple[Edit, ...]:
    if not isinstance(event.node, ast.Call):
        return ()
    for node, value in zip(event.node.args, event.inputs, strict=False):
        if value is half and not isinstance(node, ast.Starred):
            return (edit("replace", node, f"{grouped(event.module, node)}.float()"),)
    return ()
