"""# gradient-read-before-unscale

## What it does
Reports code that reads, logs or edits gradients (`p.grad`, norms, histograms) between a scaled
backward and `scaler.step(optimizer)`, with no `unscale_` before it, or between a trainer's backward
in float16 and its clipping. Setting a gradient to None is no reading. Silent where gradients are
averaged over ranks, or multiplied or divided by anything: unscaling gives the same behind it; and
where they are divided by their own norm, for a direction.

## Why is this bad
The values are the true gradients times the loss scale: 65536 times too large at first, and
twice or half as large whenever the scale changes. Curves of gradient norms jump with it; noise,
decay or thresholds of a fixed size are too weak by the same factor.

## Example
    scaler.scale(loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scaler.step(optimizer)
    scaler.update()

## Use instead
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Unsafe: `--unsafe-fixes` puts `unscale_` before the reading, where that stands in the same
function as the step. Constants that were tuned on scaled values have to be tuned again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import first_argument, is_simple, receiver, site_in, statement_edit
from ampwise_lint.queries.precision import in_float16, is_scaled
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node, lines_of
from ampwise_lint.source.places import scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, SCALER
from ampwise_lint.values.abstract import Wrapper
from ampwise_lint.values.events import (
    Backward,
    GradientRead,
    Managed,
    OptimizerStep,
    ScalerStep,
    Unscale,
    ZeroGrad,
)


@rule(
    "AMP102", "gradient-read-before-unscale", "warning", fix="unsafe", triggers=(SCALER, AUTOCAST)
)
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        scaled: Backward | None = None
        read: dict[int, GradientRead] = {}
        for event in trace.events:
            match event:
                case Backward():
                    scaled = event if is_scaled(event.scaled) else None
                case ZeroGrad():
                    scaled, read = None, {}
                case GradientRead() if scaled is not None and not _commutes(event):
                    read.setdefault(id(event.module.statement_of(event.node)), event)
                case Managed(unscales=True) | OptimizerStep():
                    trainer = scaled.scaled if scaled is not None else None
                    if isinstance(trainer, Wrapper):
                        yield from (_by_trainer(each, trainer) for each in read.values())
                    scaled, read = None, {}
                case Unscale() | ScalerStep():
                    yield from (_mistake(trace, each, event) for each in read.values())
                    scaled, read = None, {}
                case _:
                    pass


REDUCES = re.compile(r"\ball_?reduce|\breduce_scatter")


def _commutes(read: GradientRead) -> bool:
    """Whether it does to scaled gradients what it does to others.

    A factor, a mean over ranks, a direction: ``eps * p.grad / p.grad.norm()``.
    """
    around = scope_of(read.module, read.node)
    if read.is_linear or not read.copies:
        return read.is_linear or _is_normalized(read.module, around)
    return around is not read.module.tree and any(
        isinstance(each, ast.Call) and REDUCES.search(dotted(each.func))
        for each in ast.walk(around)
    )


def _is_normalized(module: Module, code: ast.AST) -> bool:
    """Whether a function reads gradients only to divide them by their own norm, or to ask of it."""
    parents = module.parents
    reads = [e for e in ast.walk(code) if isinstance(e, ast.Attribute) and e.attr == "grad"]
    norms = [each for read in reads if (each := _norm_of(read, parents)) is not None]
    bound = {
        dotted(to)
        for each in norms
        if isinstance(around := parents[id(each)], ast.Assign)
        for to in around.targets
    }
    used = [e for e in ast.walk(code) if isinstance(e, ast.Name) and e.id in bound]
    divides = {id(inner) for e in (*norms, *used) if (inner := _dividend(e, parents)) is not None}
    others = [each for each in reads if _norm_of(each, parents) is None]
    asked = [each for each in used if isinstance(each.ctx, ast.Load)]
    if not all(_dividend(e, parents) or _is_compared(e, parents) for e in asked):
        return False  # it is shown, or kept
    return bool(divides) and all(
        _is_compared(each, parents)
        or any(id(around) in divides for around in _factors_around(each, parents))
        for each in others
    )


def _is_compared(value: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """``norm != 0``, ``torch.isnan(norm)``."""
    around = parents[id(value)]
    asks = isinstance(around, ast.Call) and dotted(around.func).rpartition(".")[2]
    return isinstance(around, ast.Compare) or asks in ("isnan", "isinf", "isfinite")


def _norm_of(read: ast.AST, parents: dict[int, ast.AST]) -> ast.Call | None:
    """The call that takes a gradient's norm: ``torch.norm(p.grad)``, ``p.grad.norm()``."""
    around = parents[id(read)]
    call = parents[id(around)] if isinstance(around, ast.Attribute) else around
    if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2].endswith("norm"):
        return call
    return None


def _dividend(norm: ast.AST, parents: dict[int, ast.AST]) -> ast.expr | None:
    """What is divided by a norm."""
    match parents[id(norm)]:
        case ast.BinOp(left=left, op=ast.Div(), right=right) if right is norm:
            return left
        case _:
            return None


def _factors_around(read: ast.AST, parents: dict[int, ast.AST]) -> Iterator[ast.AST]:
    """A gradient, and the products it is a factor of."""
    yield read
    while isinstance(around := parents[id(read)], ast.BinOp) and isinstance(around.op, ast.Mult):
        read = around
        yield read


def _by_trainer(read: GradientRead, trainer: Wrapper) -> Mistake:
    return Mistake(
        read.node,
        read.module,
        f"{in_float16(trainer)}the trainer scales the loss, and gradients are {_done(read)} "
        "before it unscales them: values are up to 65,536 times too large; read them "
        "behind its clipping",
    )


def _done(read: GradientRead) -> str:
    return "edited" if read.is_edit else "read"


def _mistake(trace: Trace, read: GradientRead, step: ScalerStep | Unscale) -> Mistake:
    scaler, optimizer = receiver(step.node) or "scaler", first_argument(step.node) or "optimizer"
    call = f"{scaler}.unscale_({optimizer})"
    site = site_in(read, step.module)
    inline = site.module is step.module and site.functions == step.context.functions
    around = {each.node for each in read.context.loops}
    # What a loop over optimizers calls one is not known before it.
    inline &= is_simple(trace) and {each.node for each in step.context.loops} <= around
    before = _outermost(read) if site.node is read.node else site.node
    edits = (statement_edit("before", site.module, before, call),) if inline else ()
    return Mistake(
        site.node,
        site.module,
        f"gradients are {_done(read)} while they are still multiplied by the loss scale: values "
        f"are up to 65,536 times too large and change when the scale does; call {call} first",
        edits,
    )


def _outermost(read: GradientRead) -> Node:
    """The statement to put the call before: the loop over parameters, where there is one."""
    loops = read.context.loops
    if not loops or loops[-1].over_data:
        return read.node
    first, last = lines_of(loops[-1].node)
    begin, end = lines_of(read.node)
    return loops[-1].node if first <= begin and end <= last else read.node
