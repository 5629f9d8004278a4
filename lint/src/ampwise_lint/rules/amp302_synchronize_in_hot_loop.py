"""# synchronize-in-hot-loop

## What it does
Reports `torch.cuda.synchronize()` and `empty_cache()` on every step of a training loop in mixed
precision. A synchronize beside a reading of the clock is a measurement, and not reported; nor is
what stands in a branch for evaluation (`if not self.training`).

## Why is this bad
`synchronize` waits for all queued work, so the device idles while the host queues the next
step. `empty_cache` hands cached blocks back to the driver, and the next step asks for them
again; it makes no more memory available to the same process.

## Example
    for x, y in loader:
        train_step(x, y)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

## Use instead
    for x, y in loader:
        train_step(x, y)

## Fix safety
Unsafe: `--unsafe-fixes` removes the call. Code that reads pinned host memory after it, or other
processes that share the device, may depend on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import statement_edit
from ampwise_lint.queries.steps import is_hot, step_loops
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import block_of, functions_of
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.events import Clock, Synchronize


@rule("AMP302", "synchronize-in-hot-loop", "warning", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    loops = step_loops(code)
    for trace in code.traces:
        for event in trace.of(Synchronize):
            if not event.path or not is_hot(event, loops, trace):
                continue
            name = event.path.rpartition(".")[2]
            if name == "synchronize" and _measures(trace, event):
                continue
            harm = (
                "the device runs dry until the host has caught up"
                if name == "synchronize"
                else "it waits for the device, and the next step has to ask the driver for memory "
                "again"
            )
            yield Mistake(
                event.node,
                event.module,
                f"{name} runs on every step: {harm}; remove it",
                (statement_edit("remove", event.module, event.node),),
            )


def _measures(trace: Trace, event: Synchronize) -> bool:
    """Whether the clock is read beside it, or events of the device are, in the same loop."""
    index = trace.events.index(event)
    near = trace.events[max(0, index - 3) : index + 4]
    around: list[ast.AST] = [*functions_of(event.module, event.node)[:1]]
    around += [each.node for each in event.context.loops[-1:]]
    return (
        any(isinstance(each, Clock) for each in near)
        or any(map(_is_watch, _beside(event)))
        or any(
            isinstance(each, ast.Attribute) and each.attr == "elapsed_time"
            for outer in around
            for each in ast.walk(outer)
        )
    )


def _beside(event: Synchronize) -> list[ast.stmt]:
    """The statements before and behind it."""
    own = event.module.statement_of(event.node)
    block = block_of(event.module, own)
    place = block.index(own)
    return [*block[max(0, place - 1) : place], *block[place + 1 : place + 2]]


WATCH = re.compile(
    r"(watch|timer|clock|time)\w*\.(start|stop|begin|end|lap|elapsed|reset)$|(^|[._])(tic|toc)$",
    re.IGNORECASE,
)
"""What starts and stops a measurement of time."""


def _is_watch(statement: ast.stmt) -> bool:
    """``timer.stop()``, ``took = toc()``."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and bool(WATCH.search(dotted(value.func)))
