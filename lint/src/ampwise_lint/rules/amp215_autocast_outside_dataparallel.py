"""# autocast-outside-dataparallel-forward

## What it does
Reports the call of an `nn.DataParallel` network inside an autocast region whose dtype is not
float16. PyTorch hands its replicas that autocast is on, but not the dtype: for float16, the
default, nothing goes wrong, and nothing is reported.

## Why is this bad
Autocast's state belongs to a thread, and DataParallel runs each replica in a thread of its own.
It takes over that autocast is on, but not its dtype: with `dtype=torch.bfloat16` the replicas
run in float16, CUDA's default, which ends at 65504, and no scaler is there.

## Example
    model = nn.DataParallel(Net().cuda())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)

## Use instead
    class Net(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.layers(x)

    model = nn.DataParallel(Net().cuda())

## Fix safety
No automatic fix: the module's code changes, or DataParallel gives way to
DistributedDataParallel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.roles import RUNS
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Instance, Model, Region
from ampwise_lint.values.events import Forward


@rule("AMP215", "autocast-outside-dataparallel-forward", "warning", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(Forward):
            region = event.context.region
            wrapped = isinstance(event.model, Model | Instance) and event.model.wrapped == "dp"
            other = region is not None and region.dtype != "float16" and _names_dtype(region)
            if wrapped and event.is_root and other and _is_call(event):
                yield Mistake(
                    event.node,
                    event.module,
                    "autocast stands around a DataParallel call: its replicas run in threads of "
                    "their own, which take over that autocast is on but not its dtype, and so run "
                    "in float16; put autocast inside the module's forward, or use "
                    "DistributedDataParallel",
                )


def _names_dtype(region: Region) -> bool:
    """Whether autocast is told a dtype; replicas run on CUDA, where float16 is its default."""
    if region.dtype is not None or not isinstance(region.node, ast.Call):
        return True
    named = (each.arg in ("dtype", None) for each in region.node.keywords)
    return len(region.node.args) > 1 or any(named)


def _is_call(event: Forward) -> bool:
    """Whether the wrapper itself is called: any other method is the module's, in this thread."""
    method = event.node.func if isinstance(event.node, ast.Call) else None
    owner = method.attr if isinstance(method, ast.Attribute) else ""
    return not RUNS.search(owner) or owner == "forward"
