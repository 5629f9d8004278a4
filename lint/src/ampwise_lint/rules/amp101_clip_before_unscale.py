"""# clip-before-unscale

## What it does
Reports gradient clipping between a scaled backward and `scaler.step(optimizer)` with no
`scaler.unscale_(optimizer)` before it. Also clipping, by torch's functions, of what Accelerate,
Fabric or Lightning's manual optimization has scaled, in float16 or where precision is a setting.
Silent for a disabled scaler, and where the gradients' owner or the scaler is not in sight.

## Why is this bad
Gradients are still multiplied by the loss scale, at first 65536, so a limit of 1.0 acts as one
of 1/65536: nearly every step is clipped, and the update shrinks by the loss scale. Measured
with SGD, lr 0.1: the weights move by 1.4e-6 instead of 0.089. When the scale doubles, so does
the harm.

## Example
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

## Use instead
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

## Fix safety
Safe: `--fix` puts `unscale_` before the clip and removes a later one. `step` does not unscale a
second time, so only the clip changes. Clipping written by hand is reported and not fixed, and so is
what several scalers, a closure or other arguments of a step are involved in.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import (
    edit,
    first_argument,
    is_simple,
    receiver,
    site_in,
    statement_edit,
)
from ampwise_lint.queries.owners import same_owner
from ampwise_lint.queries.precision import in_float16, is_real
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.triggers import AUTOCAST, SCALER
from ampwise_lint.values.abstract import Wrapper
from ampwise_lint.values.events import (
    Backward,
    Clip,
    Managed,
    OptimizerStep,
    ScalerStep,
    Unscale,
    ZeroGrad,
)


@rule("AMP101", "clip-before-unscale", "error", fix="safe", triggers=(SCALER, AUTOCAST))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for index, event in enumerate(trace.events):
            if isinstance(event, Clip) and (step := _step_of(trace, index, event)):
                yield _mistake(trace, index, event, step)
        yield from _past_trainer(trace)


def _past_trainer(trace: Trace) -> Iterator[Mistake]:
    """Clips of gradients that a trainer has scaled and was not asked to unscale."""
    trainer: Wrapper | None = None
    clips: list[Clip] = []
    for event in trace.events:
        match event:
            case Backward(scaled=scaled):
                trainer = scaled if isinstance(scaled, Wrapper) and scaled.scales else None
            case Clip() if trainer is not None:
                clips.append(event)
            case OptimizerStep() if trainer is not None:
                for each in clips:
                    yield Mistake(each.node, each.module, _told(trainer))
                trainer, clips = None, []
            case Managed(unscales=True) | ZeroGrad():
                trainer, clips = None, []
            case _:
                pass


def _told(trainer: Wrapper) -> str:
    way = "accelerator.clip_grad_norm_" if "accelerate" in trainer.path else "clip_gradients"
    return (
        f"{in_float16(trainer)}the trainer scales the loss, and gradients are clipped before it "
        f"unscales them: the limit is the loss scale too strict, so updates shrink by as "
        f"much; call its own {way}"
    )


def _step_of(trace: Trace, index: int, clip: Clip) -> ScalerStep | None:
    """The step of the optimizer whose gradients are clipped while they are scaled."""
    if not _is_scaled(trace, index):
        return None
    steps = _next_steps(trace, index)
    own = [each for each in steps if same_owner(clip.params, each.optimizer)]
    maybe = own or [each for each in steps if same_owner(clip.params, each.optimizer) is None]
    for step in maybe[:1]:
        if not _is_unscaled(trace, index, step):
            return step
    return None


def _is_scaled(trace: Trace, index: int) -> bool:
    """Whether the last backward before an event was a scaled one, not stepped or zeroed since."""
    for event in reversed(trace.events[:index]):
        match event:
            case Backward(scaled=scaled):
                return is_real(scaled)
            case ZeroGrad() | ScalerStep():
                return False
            case _:
                pass
    return False


def _next_steps(trace: Trace, index: int) -> list[ScalerStep]:
    steps: list[ScalerStep] = []
    for event in trace.events[index:]:
        if isinstance(event, ScalerStep):
            steps.append(event)
        elif isinstance(event, Backward) and steps:
            break
    return steps


def _is_unscaled(trace: Trace, index: int, step: ScalerStep) -> bool:
    for event in reversed(trace.events[:index]):
        match event:
            case Unscale(optimizer=optimizer):
                if (
                    optimizer is step.optimizer
                    or same_owner(optimizer, step.optimizer) is not False
                ):
                    return True
            case ScalerStep() if event.optimizer is step.optimizer:
                return False
            case _:
                pass
    return False


def _mistake(trace: Trace, index: int, clip: Clip, step: ScalerStep) -> Mistake:
    scaler, optimizer = receiver(step.node) or "scaler", first_argument(step.node) or "optimizer"
    call = f"{scaler}.unscale_({optimizer})"
    edits = _edits(trace, index, clip, step, call)
    site = site_in(clip, step.module)
    return Mistake(
        site.node,
        site.module,
        f"gradients are clipped while they are still multiplied by the loss scale: the limit is "
        f"the loss scale too strict, so updates shrink by as much; call {call} before clipping",
        edits,
    )


def _edits(trace: Trace, index: int, clip: Clip, step: ScalerStep, call: str) -> tuple[Edit, ...]:
    """Unscale before clipping, where that happens once for each step."""
    module = clip.module
    if (
        clip.by_hand
        or not is_simple(trace)
        or module is not step.module
        or clip.context.functions != step.context.functions
    ):
        return ()
    mine = {id(each.node) for each in clip.context.conditions}
    waits = any(each.periodic and id(each.node) not in mine for each in step.context.conditions)
    if waits or clip.context.loops[-1:] != step.context.loops[-1:]:
        return ()
    edits = (statement_edit("before", module, clip.node, call),)
    later = next((e for e in trace.events[index:] if isinstance(e, Unscale)), None)
    if later is None:
        return edits
    here, there = module.statement_of(clip.node), module.statement_of(later.node)
    if module.parents[id(here)] is not module.parents[id(there)]:
        return ()
    return (*edits, edit("remove", there))
