"""# autocast-device-mismatch

## What it does
Reports `autocast("cuda")` around a network that surely runs on the CPU, and a CUDA `GradScaler`
for a step on the CPU. Silent where the device is not known, or the CPU is for want of a GPU, or one
choice of several.

## Why is this bad
Where CUDA is not available, both switch themselves off with no more than a warning ("CUDA is
not available or torch_xla is imported. Disabling autocast."), and training runs in float32.
Where it is, CUDA's region does not touch operations on CPU tensors.

## Example
    model = Net().to("cpu")
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)

## Use instead
    model = Net().to("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(x), y)

## Fix safety
Unsafe: `--unsafe-fixes` makes the device "cpu" where the call names its device, or is one of
`torch.cuda.amp`. Moving the network to CUDA may be what is meant; and where CUDA's autocast did
nothing, training now runs in the lower precision (a dtype that is given stays; without one it is
bfloat16 on CPUs).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import has_torch
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Const, Region, Scaler
from ampwise_lint.values.events import Backward, Forward, Moved


@rule("AMP218", "autocast-device-mismatch", "warning", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    on_cpu = [each for each in code.traces if _is_cpu(each)]
    others = [each for each in code.traces if not _is_cpu(each)]
    # What a path with another device comes through, too, is on the CPU by choice.
    chosen = {id(e.node) for trace in others for e in (*_regions(trace), *_scalers(trace))}
    for trace in on_cpu:
        for region in _regions(trace):
            if id(region.node) not in chosen:
                yield Mistake(
                    region.node,
                    region.module,
                    "autocast is for CUDA, but the network and its data are on the CPU: it casts "
                    "nothing and training runs in float32 without a word; use "
                    'torch.autocast("cpu", dtype=torch.bfloat16)',
                    _edits(region.node, region.module, "autocast"),
                )
        for scaler in _scalers(trace):
            if id(scaler.node) not in chosen:
                yield Mistake(
                    scaler.node,
                    scaler.module,
                    "the scaler is for CUDA, but training runs on the CPU: it switches itself off "
                    'with a warning; use torch.amp.GradScaler("cpu"), or none with bfloat16',
                    _edits(scaler.node, scaler.module, "GradScaler"),
                )


def _regions(trace: Trace) -> Iterator[Region]:
    """CUDA's autocast regions in which networks run."""
    for event in trace.of(Forward):
        region = event.context.region
        if region is not None and region.device == "cuda" and event.is_root:
            yield region


def _scalers(trace: Trace) -> Iterator[Scaler]:
    """CUDA's scalers that scale losses."""
    for event in trace.of(Backward):
        scaler = event.scaled
        if isinstance(scaler, Scaler) and scaler.path and _for_cuda(scaler):
            yield scaler


def _is_cpu(trace: Trace) -> bool:
    """Whether the path surely trains on the CPU, and not for want of a GPU."""
    if any(map(_asks, trace.decided)):
        return False
    moved = [each for each in trace.of(Moved) if not each.context.no_grad]
    if any(_asks(branch.key) for each in moved for branch in each.context.conditions):
        return False
    trained = [e for e in trace.of(Forward) if e.is_root and not e.context.no_grad]
    is_cpu = bool(trained) and all(each.on_cpu for each in trained)
    return {each.device for each in moved} == {"cpu"} or is_cpu


def _asks(condition: str) -> bool:
    """Whether a condition asks for the device."""
    return any(each in condition for each in ("available", "cuda", "cpu"))


def _for_cuda(scaler: Scaler) -> bool:
    return isinstance(scaler.device, Const) and str(scaler.device.value).startswith("cuda")


def _edits(node: Node, module: Module, name: str) -> tuple[Edit, ...]:
    """Make the device "cpu"; ``torch.cuda.amp``, which takes none, becomes ``torch.amp``."""
    if not isinstance(node, ast.Call):
        return ()
    path = module.imports.full(node.func)
    if not path.startswith(("torch.amp.", "torch.cuda.amp.", f"torch.{name}")):
        return ()
    if path.startswith("torch.cuda."):
        first = "enabled" if name == "autocast" else "init_scale"
        if not has_torch(module) or len(node.args) > 1:
            return ()
        new = edit("replace", node.func, f"torch.amp.{name}")
        return (new, edit("argument", node, f'0:"cpu"|{first}'))
    named = [each.value for each in node.keywords if each.arg in ("device", "device_type")]
    devices = [*node.args[:1], *named]
    if not devices:  # a scaler is CUDA's where nothing is said
        return (edit("argument", node, '0:"cpu"'),)
    device = devices[0]
    is_text = isinstance(device, ast.Constant) and isinstance(device.value, str)
    return (edit("replace", device, '"cpu"'),) if is_text else ()
