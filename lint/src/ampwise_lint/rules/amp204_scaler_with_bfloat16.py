"""# scaler-with-bfloat16

## What it does
Reports an enabled `GradScaler(...)` that scales losses of a training whose autocast regions are
all bfloat16, or are where an option chooses that and leaves the scaler on, and one that is enabled
for bfloat16 only; of a wrapper that holds a scaler, as timm's does, where the wrapper is made.
Silent where the dtype is not known, and where it is bfloat16 for want of a GPU.

## Why is this bad
bfloat16 ends at 3.39e38, as float32 does, so gradients neither underflow nor overflow for want
of range, and scaling gains nothing. It costs a pass over all gradients and, with an optimizer
that is not fused, a host sync per step.

## Example
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()

## Use instead
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    with torch.autocast("cuda", dtype=dtype):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()

## Fix safety
Unsafe: `--unsafe-fixes` adds `enabled=False`. The scaler also skips steps with inf or NaN, and
some trainings lean on that.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Region, Scaler, Wrapper
from ampwise_lint.values.events import Backward, Enter, Made, Managed


@rule("AMP204", "scaler-with-bfloat16", "info", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    yield from _in_wrappers(code)
    scalers: dict[int, Scaler] = {}
    dtypes: dict[int, set[str | None]] = defaultdict(set)
    chosen: set[int] = set()
    for trace in code.traces:
        entered = [each.region for each in trace.of(Enter)]
        regions = {each.dtype for each in entered}
        for event in trace.of(Backward):
            scaler = event.scaled
            if isinstance(scaler, Scaler) and scaler.path:
                scalers[id(scaler.node)] = scaler
                dtypes[id(scaler.node)] |= regions
                chooses = regions == {"bfloat16"} and all(e.device != "cpu" for e in entered)
                if chooses and not _is_on_cpu(trace) and _is_always_on(scaler, entered):
                    chosen.add(id(scaler.node))
    for place, scaler in scalers.items():
        if _is_off_for_bfloat16(scaler.node):
            continue
        if dtypes[place] == {"bfloat16"} or _waits_for_bfloat16(scaler.node):
            yield Mistake(
                scaler.node,
                scaler.module,
                "autocast runs in bfloat16, which has float32's range: loss scaling only costs a "
                "check and a host sync per step; use GradScaler(enabled=False), or none",
                (edit("argument", scaler.node, "enabled=False"),),
            )
        elif place in chosen:
            yield Mistake(
                scaler.node,
                scaler.module,
                "where bfloat16 is chosen for autocast the scaler is on, too: that has float32's "
                "range, and loss scaling only costs a check and a host sync per step; enable the "
                "scaler for float16 only",
            )


def _is_on_cpu(trace: Trace) -> bool:
    """Whether a path is one without a GPU: bfloat16 is for the CPU there, a CUDA scaler is off."""
    return any(
        taken if key.endswith("Eq 'cpu')") else not taken
        for key, taken in trace.decided.items()
        if DEVICES.search(key)
    )


DEVICES = re.compile(r"Eq '(cpu|cuda)'\)$|cuda\.is_available\(\)$|startswith\('cuda'\)")


def _in_wrappers(code: Analysis) -> Iterator[Mistake]:
    """A wrapper that holds a scaler: where it is made, for others may use it for float16."""
    made: dict[int, Made] = {}
    dtypes: dict[int, set[str | None]] = defaultdict(set)
    for trace in code.traces:
        stepping = {each.path for each in trace.of(Managed) if each.optimizer is not None}
        regions = {e.region.dtype for e in trace.of(Enter) if not e.context.no_grad}
        for event in trace.of(Made):
            wrapper = event.value
            if isinstance(wrapper, Wrapper) and wrapper.skips and wrapper.path in stepping:
                made[id(event.node)] = event
                dtypes[id(event.node)] |= regions
    for place, event in made.items():
        if dtypes[place] == {"bfloat16"}:
            yield Mistake(
                event.node,
                event.module,
                "autocast runs in bfloat16, which has float32's range: the loss scaling of this "
                "wrapper only costs a check and a host sync per step; run backward and the step "
                "without it",
            )


def _is_always_on(scaler: Scaler, entered: list[Region]) -> bool:
    """Whether nothing switches a scaler off but what switches autocast off."""
    switch = _enabled(scaler.node)
    if switch is None or isinstance(switch, ast.Constant):
        return not any(isinstance(each, ast.Starred) for each in getattr(scaler.node, "args", ()))
    text = ast.unparse(switch)
    own = [ast.unparse(each) for e in entered if (each := _enabled(e.node)) is not None]
    # ``args.amp`` and a network's ``self.args.amp`` are one option.
    return any(f".{each}".endswith(f".{text}") or f".{text}".endswith(f".{each}") for each in own)


def _enabled(call: ast.AST) -> ast.expr | None:
    given = call.keywords if isinstance(call, ast.Call) else []
    return next((each.value for each in given if each.arg in ("enabled", None)), None)


def _is_off_for_bfloat16(call: ast.AST) -> bool:
    """``enabled=not use_bf16``: it is on only where there is no bfloat16."""
    match _enabled(call):
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return bool(re.search(r"bf_?16|bfloat16", ast.unparse(operand)))
        case _:
            return False


def _waits_for_bfloat16(call: ast.AST) -> bool:
    """``enabled=dtype == "bfloat16"``."""
    match _enabled(call):
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=str(name))]):
            return name in ("bfloat16", "bf16", "torch.bfloat16")
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Attribute(attr="bfloat16")]):
            return True
        case _:
            return False
