"""# half-parameters

## What it does
Reports `model.half()` or `.to(torch.float16)` of a network, or of one of its modules, whose
parameters are trained: through a scaler, by a trainer in float16 (`TrainingArguments(fp16=True)`),
or by Adam, AdamW, NAdam or RAdam with an eps that is 0 in float16; one finding for all casts of a
function whose parameters one optimizer trains.

## Why is this bad
`unscale_`, and `step` of an optimizer that is not fused, raise ValueError "Attempting to
unscale FP16 gradients." Adam's eps of 1e-8 is 0 in float16 and the square of a gradient of 1e-4
is, too: one step (not fused) made weights -inf, and NaN where the gradient was 0. Updates below
half an ULP of a weight are lost.

## Example
    model = Net().cuda().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss = criterion(model(x.half()).float(), y)
    loss.backward()
    optimizer.step()

## Use instead
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

## Fix safety
No automatic fix: memory, checkpoints and casts of inputs depend on the parameters' dtype.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.edits import receiver, site_in
from ampwise_lint.queries.owners import is_part, owners
from ampwise_lint.queries.precision import loses_eps, stays_half
from ampwise_lint.queries.steps import steps_behind
from ampwise_lint.queries.wrappers import is_led
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import functions_of
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import HALF
from ampwise_lint.values.abstract import Instance, Model, Optimizer, Wrapper, key_of
from ampwise_lint.values.events import Backward, CastDown, Managed, ScalerStep


@rule("AMP206", "half-parameters", "error", triggers=(HALF,))
def check(code: Analysis) -> Iterator[Mistake]:
    helped = HELPED.search(code.module.source.text)
    adapted = ADAPTED.search(code.module.source.text)
    found: dict[tuple[object, ...], dict[int, CastDown]] = {}
    for trace in code.traces:
        is_managed = is_led(trace)
        for event in trace.of(CastDown):
            trainers = [] if helped else [*_scaling_behind(trace, event)]
            if event.cast != "float16" or (is_managed and not trainers):
                continue
            if adapted and not trainers:
                continue
            if event.module.source.ignores(event.node.lineno, "AMP206"):
                continue
            if not stays_half(trace, event):
                continue
            for by, harm in _trained(trace, event, trainers):
                within = functions_of(event.module, event.node)[:1]
                cause = (id(event.module), *map(id, within), by, harm)
                found.setdefault(cause, {})[id(event.node)] = event
    told: set[int] = set()
    for (*_, harm), casts in found.items():
        if not told.issuperset(casts):
            told.update(casts)
            in_order = sorted(casts.values(), key=lambda each: each.node.lineno)
            yield _mistake(code, in_order, str(harm))


HELPED = re.compile(r"lora|peft|adapter|requires_grad", re.IGNORECASE)
"""Of what a trainer is given, not all may be trained."""
ADAPTED = re.compile(r"\bget_peft_model\b")
"""It freezes what is half, and makes the adapters, which are trained, in float32."""


def _scaling_behind(trace: Trace, cast: CastDown) -> Iterator[Wrapper]:
    """Trainers that scale losses in float16 after a network was halved."""
    for event in trace.events[trace.events.index(cast) :]:
        match event:
            case Managed(trainer=Wrapper() as trainer) | Backward(scaled=Wrapper() as trainer):
                if trainer.mixed == "float16":
                    yield trainer
            case _:
                pass


def _holds(optimizer: Optimizer, cast: CastDown) -> bool:
    """Whether an optimizer trains what is halved; a part of a network may be frozen."""
    if isinstance(cast.value, Model | Instance) and key_of(cast.value) in owners(optimizer):
        return True
    names = cast.module.index.of(ast.Attribute)
    freezes = any(each.attr in ("requires_grad", "requires_grad_") for each in names)
    return _is_in_place(cast) and is_part(cast.value, optimizer) and not freezes


def _is_in_place(cast: CastDown) -> bool:
    """``net.layer.half()`` and ``net.layer = net.layer.half()``: a module, no tensor."""
    match cast.module.parents.get(id(cast.node)):
        case ast.Expr():
            return True
        case ast.Assign(targets=[target]):
            return bool(dotted(target)) and dotted(target) == receiver(cast.node)
        case _:
            return False


def _trained(trace: Trace, cast: CastDown, trainers: list[Wrapper]) -> Iterator[tuple[object, str]]:
    """What trains the parameters that are cast, and what comes of that."""
    if any(e.network is not None and key_of(e.network) == key_of(cast.value) for e in trainers):
        yield "trainer", RAISES
        return
    for step in steps_behind(trace, cast):
        optimizer = step.optimizer
        if not isinstance(optimizer, Optimizer) or not _holds(optimizer, cast):
            continue
        if isinstance(step, ScalerStep) or trainers:
            yield id(optimizer.node), RAISES
        elif loses_eps(optimizer):
            yield id(optimizer.node), DIVIDES


RAISES = "unscale_, and step unless fused, raise ValueError (Attempting to unscale FP16 gradients)"
DIVIDES = "Adam's eps of 1e-8 is 0 in float16, so updates divide by zero and become NaN"


def _mistake(code: Analysis, casts: list[CastDown], harm: str) -> Mistake:
    first = site_in(casts[0], code.module)
    if first.node is not casts[0].node:
        casts = casts[:1]  # a function of another file is told to cast them
    lines = sorted({each.node.lineno for each in casts} - {casts[0].node.lineno})
    also = f" (also in line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))})" if lines else ""
    return Mistake(
        first.node,
        first.module,
        f"the parameters themselves are float16{also}: {harm}; keep parameters in float32 and run "
        "the forward under autocast",
    )
