"""# low-precision-weights

## What it does
Reports a network whose parameters are all cast to bfloat16 or float16 and trained by a plain
optimizer of `torch.optim`, also by a trainer: `precision="bf16-true"`, a bfloat16 network for
`TrainingArguments(bf16=True)`. Silent where the file has float32 masters, stochastic rounding or
adapters, or freezes part of the network that trains, and where AMP206 reports the cast already.

## Why is this bad
bfloat16 keeps 8 bits, float16 11: an update that is smaller than half an ULP of its weight, 1/512
of it in bfloat16, changes nothing. With a learning rate of 1e-4 most updates of Adam are, once
weights have grown to 0.1; training stands still where float32 goes on.

## Example
    model = Net().cuda().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

## Use instead
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

## Fix safety
No automatic fix: memory, checkpoints and casts of inputs depend on the parameters' dtype.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.owners import is_within, owners
from ampwise_lint.queries.precision import is_scaled, loses_eps, stays_half
from ampwise_lint.queries.steps import steps_behind
from ampwise_lint.queries.wrappers import is_led
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, HALF
from ampwise_lint.values.abstract import Instance, Model, Optimizer, Wrapper, key_of
from ampwise_lint.values.events import Backward, CastDown, Made, Managed, OptimizerStep

HELPED = re.compile(
    r"master(?!_?(process|rank|addr|port|node|ip))|fp32_|stochastic|kahan|(?<![a-z])q?lora|peft|adapter",
    re.IGNORECASE,
)
"""Words for what keeps small updates; the process that is called master is none of it."""
OTHER = re.compile(
    r"^(self\.)?_?(ref|teacher|target|old|frozen|reward|critic|ema|vae|text_enc|t5|clip|vgg|lpips)"
)
"""Networks that are frozen beside the one that trains, by their names."""


@rule("AMP220", "low-precision-weights", "warning", triggers=(HALF, AUTOCAST))
def check(code: Analysis) -> Iterator[Mistake]:
    if HELPED.search(code.module.source.text) or _freezes_part(code.module):
        return
    yield from _by_trainers(code)
    for trace in code.traces:
        trained = [each.trainer.network for each in trace.of(Managed) if each.trainer is not None]
        networks = {key_of(each) for each in trained if each is not None}
        led = is_led(trace)
        for event in trace.of(CastDown):
            if not isinstance(event.value, Model | Instance):
                continue
            given = key_of(event.value) in networks and event.cast == "bfloat16"
            if (given or (not led and _is_trained(trace, event))) and stays_half(trace, event):
                yield Mistake(
                    event.node,
                    event.module,
                    _lost(event.cast),
                )


def _freezes_part(module: Module) -> bool:
    """Whether part of the network that trains may be frozen, as under adapters."""
    found = [each for each in module.index.of(ast.Attribute) if _sets(each)]
    return any(not OTHER.search(_frozen(module, each)) for each in found)


def _sets(node: ast.Attribute) -> bool:
    """``p.requires_grad = False``, ``p.requires_grad_(False)``: no question what trains."""
    stored = node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)
    return stored or node.attr == "requires_grad_"


def _frozen(module: Module, node: ast.Attribute) -> str:
    """Whose parameters a ``requires_grad`` is of: of ``p``, what the loop around runs over."""
    over = node.value
    around = module.parents.get(id(node))
    while isinstance(over, ast.Name) and around is not None:
        if isinstance(around, ast.For) and dotted(around.target) == over.id:
            over = around.iter
        around = module.parents.get(id(around))
    while isinstance(over, ast.Call):
        over = over.func.value if isinstance(over.func, ast.Attribute) else over.func
    return dotted(over)


def _by_trainers(code: Analysis) -> Iterator[Mistake]:
    """Trainers that cast all parameters, and train them."""
    trained = {
        id(wrapper)
        for trace in code.traces
        for wrapper in (
            *(each.scaled for each in trace.of(Backward)),
            *(each.trainer for each in trace.of(Managed)),
        )
    }
    made = [each.value for each in code.of(Made) if isinstance(each.value, Optimizer)]
    if made and not any(each.path.startswith("torch.optim.") for each in made):
        return
    for trace in code.traces:
        for event in trace.of(Made):
            wrapper = event.value
            if isinstance(wrapper, Wrapper) and wrapper.weights and id(wrapper) in trained:
                yield Mistake(event.node, event.module, _lost(wrapper.weights))


def _lost(dtype: str) -> str:
    return (
        f"all parameters are {dtype} and the optimizer keeps no float32 copy: updates below "
        f"1/{512 if dtype == 'bfloat16' else 4096} of a weight are lost; keep parameters in "
        "float32 and run the forward under autocast"
    )


def _is_trained(trace: Trace, cast: CastDown) -> bool:
    """Whether an optimizer without masters steps these parameters."""
    scaled = any(is_scaled(each.scaled) for each in trace.of(Backward))
    for step in steps_behind(trace, cast):
        if not isinstance(step, OptimizerStep):
            continue
        plain = step.optimizer.path.startswith("torch.optim.")
        # AMP206 says what Adam's eps does in float16, and a scaler.
        other = cast.cast == "float16" and (scaled or loses_eps(step.optimizer))
        whole = key_of(cast.value)
        if plain and not other and any(is_within(each, whole) for each in owners(step.optimizer)):
            return True
    return False
