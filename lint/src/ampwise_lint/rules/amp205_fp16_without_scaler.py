"""# fp16-without-scaler

## What it does
Reports backward of an unscaled loss whose forward ran in float16 autocast, when an optimizer
steps on it and the file has no scaler, or one that is only made and saved. `autocast("cuda")`
without a dtype is float16.

## Why is this bad
The smallest float16 is 6e-8, and what is below half of it becomes 0. Where gradients of
activations are smaller, parts of the network stop learning without a word: with a loss
multiplied by 1e-6 all weight gradients were 0, and at a scale of 16384 none.

## Example
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

## Use instead
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: a scaler has to be made, stepped, updated and checkpointed; bfloat16 is the
other way out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.precision import is_unscaled
from ampwise_lint.queries.wrappers import is_managed
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Const, Scaler, Tensor, Value
from ampwise_lint.values.events import (
    Backward,
    Enter,
    Forward,
    Made,
    OptimizerStep,
    ScalerStep,
)


@rule("AMP205", "fp16-without-scaler", "error", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    if code.any(ScalerStep) or code.any(Made, _makes_scaler):
        return
    for trace in code.traces:
        if is_managed(trace) or any("scaler" in condition for condition in trace.decided):
            continue  # a path on which there is no scaler is one of two
        half = False
        runs = any(e.is_root and not e.context.no_grad for e in trace.of(Forward))
        waiting: list[Backward] = []
        for event in trace.events:
            match event:
                case Forward(is_root=True):
                    region = event.context.region
                    half = region is not None and region.dtype == "float16"
                case Enter() if _is_in_forward(event):
                    half = event.region.dtype == "float16"
                case Backward() if is_unscaled(event) and not _has_factor(event):
                    # Where no network is known as one, the loss tells what it ran in.
                    if half or (not runs and _is_made_in_half(event.tensor)):
                        waiting.append(event)
                case OptimizerStep():
                    yield from map(_mistake, waiting)
                    waiting = []
                case _:
                    pass


def _makes_scaler(event: Made) -> bool:
    """Whether a scaler is made there that anything but a checkpoint uses."""
    if not isinstance(event.value, Scaler):
        return False
    around = event.module.parents[id(event.node)]
    name = dotted(around.targets[0]) if isinstance(around, ast.Assign) else ""
    return not name or any(
        dotted(each) == name and not _is_stored(event.module, each)
        for each in (*event.module.index.of(ast.Name), *event.module.index.of(ast.Attribute))
    )


def _is_stored(module: Module, name: ast.Name | ast.Attribute) -> bool:
    """Whether it is only bound there, or its state is saved or loaded."""
    around = module.parents[id(name)]
    is_state = isinstance(around, ast.Attribute) and around.attr in (
        "state_dict",
        "load_state_dict",
    )
    return is_state or isinstance(name.ctx, ast.Store)


def _is_in_forward(event: Enter) -> bool:
    """Whether a network opens autocast itself."""
    around = event.context.functions
    return not event.context.no_grad and bool(around) and around[-1].endswith(".forward")


def _is_made_in_half(loss: Value) -> bool:
    """Whether a loss was computed in float16 autocast."""
    region = loss.region if isinstance(loss, Tensor) else None
    return region is not None and region.enabled and region.dtype == "float16"


def _has_factor(event: Backward) -> bool:
    """Scaled by hand: AMP216's. Times 0 a loss is switched off."""
    factor = event.tensor.factor if isinstance(event.tensor, Tensor) else None
    return factor is not None and not (isinstance(factor, Const) and factor.value == 0)


def _mistake(event: Backward) -> Mistake:
    return Mistake(
        event.node,
        event.module,
        "training runs in float16 autocast without loss scaling: gradients below 6e-8 become zero, "
        "without a word; scale the loss with torch.amp.GradScaler, or use dtype=torch.bfloat16",
    )
