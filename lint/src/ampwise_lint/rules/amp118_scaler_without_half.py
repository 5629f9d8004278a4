"""# scaler-without-half

## What it does
Reports an enabled scaler whose losses come from a training in which nothing runs in autocast or in
16 bits: neither the file nor one it imports has a word of it. Silent where the network comes from
a file that was not given, which may enter autocast in its forward.

## Why is this bad
Loss scaling keeps gradients of float16 from vanishing. In float32 it only costs: a pass over all
gradients and, with an optimizer that is not fused, a host sync on every step. Mostly the autocast
was forgotten, and a training that is meant to be mixed runs in float32.

## Example
    scaler = torch.amp.GradScaler("cuda")
    loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: whether autocast is missing or the scaler is too much, only the author knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.precision import is_handed_in
from ampwise_lint.queries.wrappers import is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Instance, Model, Scaler, Value, key_of
from ampwise_lint.values.events import Backward, Forward, ScalerStep

HALF = re.compile(
    r"autocast|\bhalf\b|float16|fp_?16|bf16|HalfTensor|mixed_?precision|\.precision\b"
    r"|\bprecision[\"']?\]?\s*[=:](?!\s*\w+[(.])",
    re.IGNORECASE,
)
"""Words of lower precision; a precision that a function computes is a figure."""


@rule("AMP118", "scaler-without-half", "warning", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    if HALF.search(code.module.source.text):
        return
    scalers = list(_scalers(code))
    project = code.module.project
    if scalers and any(HALF.search(project.module(e).source.text) for e in code.module.used):
        return
    for scaler in scalers:
        yield Mistake(
            scaler.node,
            scaler.module,
            "losses are scaled, but nothing runs in autocast or in 16 bits: training is in "
            "float32, and the scaler only costs; run the forward under autocast, or drop it",
        )


SEEN = ("torch.", "torchvision.", "timm.", "transformers.")
"""Libraries whose networks leave autocast to who calls them."""


def _is_unseen(network: Value) -> bool:
    """Whether a network was made by code that was not given."""
    if isinstance(network, Model) and network.wrapped and network.inner is not None:
        return _is_unseen(network.inner)
    if isinstance(network, Instance) or (isinstance(network, Model) and network.path):
        return False
    maker, at, _ = key_of(network).partition("@")
    return bool(at) and not maker.startswith(SEEN)


def _scalers(code: Analysis) -> Iterator[Scaler]:
    """Scalers made in sight that scale a loss on a path on which they step."""
    for trace in code.traces:
        if is_managed(trace) or not trace.of(ScalerStep):
            continue
        if any(_is_unseen(each.model) for each in trace.of(Forward)):
            continue
        for event in trace.of(Backward):
            given = isinstance(event.node, ast.Call) and event.node.args  # a gradient, not a loss
            if is_handed_in(event.tensor) or given:
                continue
            if isinstance(event.scaled, Scaler) and event.scaled.path:
                yield event.scaled
