"""# sync-in-hot-loop

## What it does
Reports what copies a value to the host on every step of a mixed-precision training loop:
`.item()`, `.cpu()`, `float(loss)`, `print(loss)`, `get_scale()`. Silent under a condition such
as `step % 100 == 0`.

## Why is this bad
The host waits until the device has done all that is queued, and the device then waits until the
host has queued more. The faster the step, the larger that share. Even on a CPU `.item()` has a
price, 3 us, and a finite check with `.item()` 87 us.

## Example
    for x, y in loader:
        loss = train_step(x, y)
        total += loss.item()

## Use instead
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        loss = train_step(x, y)
        total += loss.detach()
    print(total.item() / len(loader))

## Fix safety
No automatic fix: code that goes on with the number expects one, not a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import HostSync
from ampwise.lint.model.queries import is_hot, step_loops, uses_amp
from ampwise.lint.rule import Mistake, rule


@rule("AMP301", "sync-in-hot-loop", "info", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    loops = step_loops(code)
    for trace in code.traces:
        for event in trace.of(HostSync):
            if is_hot(event, loops, trace):
                yield Mistake(
                    event.node,
                    event.module,
                    f"{event.how} waits for the device on every step: the queue of kernels runs "
                    "dry and the speed of lower precision is lost; keep the tensor (.detach()), "
                    "and read it every so many steps",
                )
