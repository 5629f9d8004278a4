"""# loader-not-overlapped

## What it does
Reports a `DataLoader(...)` without `num_workers` or without `pin_memory=True`, in files that train
in mixed precision, and, where a loader pins memory, by default or where there is a GPU, copies of
batches without `non_blocking=True`. Silent for validation, by name or where nothing trains in mixed
precision on what it yields, or behind the `else` of `if is_train`, for loaders of which a batch at
most is taken, whose batches nothing but figures are made of, for dry runs and smoke tests, or whose
data set or collate function puts data on the device, and where arguments come from a variable that
has another value on some path, or of which nothing is known; of copies also of batches that a
wrapper was given as they were loaded, as it moves them itself, and of what was cast or computed on
the host on some path: that lies in other memory. Mixed precision is also FSDP's
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, and what `accelerate launch` may tell an
`Accelerator()`.

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
import re
from collections.abc import Iterator
from functools import partial
from typing import TypeGuard

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.loading import data_of, is_on_device
from ampwise_lint.queries.branches import is_trial
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.precision import trains_in_amp
from ampwise_lint.queries.reads import is_aside, is_for_a_look, only_infers, reads_by_purpose
from ampwise_lint.queries.steps import is_hot, step_loops
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import CAST_ON_HOST
from ampwise_lint.source.places import bound_to, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Const, Loader, Model, Tensor, Unknown, Value
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import PREPARED, Forward, Made, Moved, Read


@rule("AMP303", "loader-not-overlapped", "info", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not trains_in_amp(code):
        return
    yield from _blocking_copies(code)
    aside, trained = reads_by_purpose(code)
    reads = [each for trace in code.traces for each in trace.of(Read)]
    prepared = {id(each.loader.node) for each in reads if each.by == PREPARED}
    used = [e.value for e in code.of(Made) if id(getattr(e.value, "node", None)) in trained]
    beside = {_name(each) for each in used if isinstance(each, Loader)}
    paths = _paths(code)
    in_use = {id(e.node) for t in code.traces for e in t.of(Made) if not is_trial(e)}
    for event in code.of(Made):
        loader = event.value
        if not isinstance(loader, Loader) or loader.opaque or _evaluates(event):
            continue
        if id(loader.node) not in in_use:
            continue
        if id(loader.node) in aside or is_for_a_look(event) or is_on_device(event):
            continue
        if only_infers(event):
            continue
        if id(loader.node) not in trained and _has_data_for_evaluation(event):
            continue
        if id(loader.node) not in prepared and _is_left(loader, beside):
            continue
        alike = paths[id(loader.node)]
        lacking = [e for e in ("num_workers", "pin_memory") if all(_is_off(at, e) for at in alike)]
        if lacking:
            makes = "num_workers" in lacking
            remedies = ["num_workers"] * makes + ["pin_memory=True"] * ("pin_memory" in lacking)
            yield Mistake(
                loader.node,
                loader.module,
                f"the DataLoader has no {' and no '.join(lacking)}: batches are "
                f"{'made and ' if makes else ''}copied while the device waits, which the faster "
                f"step of lower precision makes worse; set {' and '.join(remedies)}, and copy with "
                "non_blocking=True",
                mend=partial(_edits, code, loader, lacking),
            )


def _paths(code: Analysis) -> dict[int, list[Loader]]:
    """What a loader is on each path, by the ``id`` of its call.

    What it has on one of them somebody has thought of: where it is trained on, or but on Windows.
    """
    found: dict[int, list[Loader]] = {}
    for trace in code.traces:
        for each in trace.of(Made):
            if isinstance(each.value, Loader):
                found.setdefault(id(each.value.node), []).append(each.value)
    return found


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
    if not any(map(_is_pinned, loaders)):
        return
    bare = _loops_over_bare_memory(code, loaders)
    for event in _copies(code):
        if any(id(each.node) in bare for each in event.context.loops):
            continue
        yield Mistake(
            event.node,
            event.module,
            "the batch lies in pinned memory, but its copy waits: pass non_blocking=True, so that "
            "it runs while the device works",
            (edit("argument", event.node, "non_blocking=True"),),
        )


def _loops_over_bare_memory(code: Analysis, loaders: list[Loader]) -> set[int]:
    """``id`` of loops over a loader that, by another branch, pins nothing: that one is at fault."""
    bare = {_name(e) for e in loaders if not e.opaque and _is_off(e, "pin_memory")}
    return {
        id(read.context.loops[-1].node)
        for trace in code.traces
        for read in trace.of(Read)
        if read.context.loops and _name(read.loader) in bare
    }


def _is_left(loader: Loader, beside: set[tuple[int, str]]) -> bool:
    """Whether of what one function makes others are read, by the names they are bound to."""
    scope, name = _name(loader)
    return scope in {each for each, _ in beside} and (scope, name) not in beside


def _name(loader: Loader) -> tuple[int, str]:
    """What a loader is called, and where; its line where nothing is bound to it."""
    names = [*bound_to(loader.module, loader.node), str(loader.node.lineno)]
    return id(scope_of(loader.module, loader.node)), names[0]


def _copies(code: Analysis) -> Iterator[Moved]:
    """Copies of batches on every step that wait."""
    loops = step_loops(code)
    made = _made_on_host(code)
    for trace in code.traces:
        moved: set[str] = set()
        for event in trace.events:
            if isinstance(event, Forward):
                moved |= _moves(event)
            if not isinstance(event, Moved) or event.non_blocking:
                continue
            tensor = event.tensor
            if not _is_as_loaded(tensor) or _place(event) in made:
                continue
            if tensor.key not in moved and is_hot(event, loops, trace):
                yield event


def _made_on_host(code: Analysis) -> set[tuple[int, ...]]:
    """Where on some path not the batch is copied, but what was made of it: mixed up, or cast."""
    moved = [each for trace in code.traces for each in trace.of(Moved)]
    return {_place(each) for each in moved if not _is_as_loaded(each.tensor)}


def _place(event: Moved) -> tuple[int, ...]:
    """Its call, and those that led to it: a helper may copy a batch here, something else there."""
    return tuple(id(each.node) for each in event.way)


def _is_as_loaded(tensor: Value) -> TypeGuard[Tensor]:
    """Whether it is a batch in the memory that the loader has put it into."""
    if not isinstance(tensor, Tensor) or not tensor.data or not _is_loaded(tensor):
        return False
    return tensor.op != CAST_ON_HOST and tensor.cast is None


def _moves(event: Forward) -> set[str]:
    """Batches that a wrapper is given as they were loaded: it moves them itself, maybe in place."""
    given = [each for each in flatten(event.inputs) if isinstance(each, Tensor)]
    is_read = not isinstance(event.model, Model)
    return set() if is_read else {each.key for each in given if each.data and not each.moved}


LOADED = re.compile(r"Loader@|load|(^|[ ._])dl\b|prefetch")


def _is_loaded(tensor: Tensor) -> bool:
    """Whether a batch comes from a loader, not from whatever else a loop runs over."""
    return bool(LOADED.search(tensor.key))


def _has_data_for_evaluation(event: Made) -> bool:
    """Whether its data is called so: ``DataLoader(val_set)``, ``Data(root, train=False)``."""
    texts = [ast.unparse(each) for each in data_of(event, 1)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    if any("train=False" in text for text in texts):
        return True
    return any(map(is_aside, words)) and not any(TRAINING.search(each) for each in words)


TRAINING = re.compile("(^|_)train", re.IGNORECASE)


def _evaluates(event: Made) -> bool:
    """Whether a loader is for validation or pictures: by its name, or that of its function."""
    if any(not each.taken and ASKS_TRAINING.search(each.key) for each in event.context.conditions):
        return True
    names = [*bound_to(event.module, event.node), *event.context.functions]
    words = [re.split(r"\W+", each.rpartition(".")[2]) for each in names]
    return any(is_aside(word) for each in words for word in each)


ASKS_TRAINING = re.compile(r"(^|[._'])train(ing)?('\)|$)", re.IGNORECASE)
"""``if is_train:``, ``if split == "train":``; what is behind its ``else`` is for evaluation."""


GPU = re.compile(r"cuda\.is_available\(\)|Eq '(cuda|gpu)'|NotEq 'cpu'")
"""What holds where there is a GPU."""


def _is_pinned(loader: Loader) -> bool:
    """Whether it pins memory, where there is a GPU and options are what they are by default."""
    return _is_on(loader.arguments.get("pin_memory"), loader.module)


def _is_on(value: Value | None, module: Module) -> bool:
    match value:
        case Const(value=constant):
            return constant is True
        case Unknown(op="not"):
            return False
        case Unknown(op="and", operands=operands):
            return all(_is_on(each, module) for each in operands)
        case Unknown(key=key):
            option = re.search(r"\w+$", key)
            is_on = option is not None and option[0] in module.flags_on
            return is_on or bool(GPU.search(key))
        case _:
            return False


def _is_off(loader: Loader, name: str) -> bool:
    value = loader.arguments.get(name)
    return value is None or (isinstance(value, Const) and not value.value)
