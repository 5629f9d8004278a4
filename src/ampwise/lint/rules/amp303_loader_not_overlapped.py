"""# loader-not-overlapped

## What it does
Reports a `DataLoader(...)` without `num_workers` or without `pin_memory=True`, in files that
train in mixed precision, and, where a loader pins memory, copies of batches without
`non_blocking=True`. Silent for validation, and where arguments come from a variable.

## Why is this bad
With `num_workers=0`, the default, the training process makes each batch itself, between steps.
A copy from memory that is not pinned is slower. The shorter the step, the larger that share:
what takes 20 % of a float32 step takes a third once the rest runs twice as fast.

## Example
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    for x, y in loader:
        x, y = x.cuda(), y.cuda()

## Use instead
    loader = DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=4, pin_memory=True
    )
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)

## Fix safety
Unsafe: `--unsafe-fixes` adds the missing arguments, or puts 4 and True where 0 and False stand, and
lets the copies of pinned batches run on. Workers need a dataset that can be sent to processes and a
guarded main script on some systems; random augmentations draw other numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ampwise.lint.findings import Edit
from ampwise.lint.model.analysis import Analysis
from ampwise.lint.model.events import Made, Moved
from ampwise.lint.model.queries import edit, is_hot, step_loops, uses_amp
from ampwise.lint.model.roles import EVALUATION, dotted
from ampwise.lint.model.values import Const, Loader, Tensor
from ampwise.lint.rule import Mistake, rule


@rule("AMP303", "loader-not-overlapped", "info", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    if not uses_amp(code):
        return
    yield from _blocking_copies(code)
    for event in code.of(Made):
        loader = event.value
        if not isinstance(loader, Loader) or loader.opaque or _evaluates(event):
            continue
        lacking = [name for name in ("num_workers", "pin_memory") if _is_off(loader, name)]
        if lacking:
            yield Mistake(
                loader.node,
                loader.module,
                f"the DataLoader has no {' and no '.join(lacking)}: batches are made and copied "
                "while the device waits, which the faster step of lower precision makes worse; set "
                "num_workers and pin_memory=True, and copy with non_blocking=True",
                mend=partial(_edits, code, loader, lacking),
            )


def _edits(code: Analysis, loader: Loader, lacking: list[str]) -> tuple[Edit, ...]:
    """Give the arguments, or other values to them; once memory is pinned, copies need not wait."""
    new = {"num_workers": "4", "pin_memory": "True"}
    given = {each.arg: each.value for each in getattr(loader.node, "keywords", ())}
    edits = [
        edit("replace", given[name], new[name])
        if name in given
        else edit("argument", loader.node, f"{name}={new[name]}")
        for name in lacking
    ]
    copies = [each for each in _copies(code) if each.module is loader.module]
    if "pin_memory" in lacking:
        edits += [edit("argument", each.node, "non_blocking=True") for each in copies]
    return tuple(dict.fromkeys(edits))


def _blocking_copies(code: Analysis) -> Iterator[Mistake]:
    """Copies of batches from pinned memory that wait all the same."""
    loaders = [e.value for e in code.of(Made) if isinstance(e.value, Loader)]
    if not any(_is_pinned(each) for each in loaders):
        return
    for event in _copies(code):
        yield Mistake(
            event.node,
            event.module,
            "the batch lies in pinned memory, but its copy waits: pass non_blocking=True, so that "
            "it runs while the device works",
            (edit("argument", event.node, "non_blocking=True"),),
        )


def _copies(code: Analysis) -> Iterator[Moved]:
    """Copies of batches on every step that wait."""
    loops = step_loops(code)
    for trace in code.traces:
        for event in trace.of(Moved):
            tensor = event.tensor
            is_batch = isinstance(tensor, Tensor) and tensor.data
            if is_batch and not event.non_blocking and is_hot(event, loops, trace):
                yield event


def _evaluates(event: Made) -> bool:
    """Whether a loader is for validation: by the name it gets, or the function it is made in."""
    statement = event.module.statement_of(event.node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [*map(dotted, targets), *event.context.functions]
    return any(EVALUATION.search(each.rpartition(".")[2]) for each in names)


def _is_pinned(loader: Loader) -> bool:
    value = loader.arguments.get("pin_memory")
    return isinstance(value, Const) and value.value is True


def _is_off(loader: Loader, name: str) -> bool:
    value = loader.arguments.get(name)
    return value is None or (isinstance(value, Const) and not value.value)
