"""A parameter that an update made inf or NaN: by which operation of the optimizer, and why.

It shows one step later, when parameters are bad already. So the task is trained again as far as
that update, which is then made under watch; and once more beside a float64 shadow, which says
whether its numbers were too large, too small, or wrong in any precision. In 16-bit parameters and
state the smallest things are lost first: the second moment of Adam holds squares, and its eps of
1e-8 is 0 in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ampwise import formats
from ampwise.bench.arm import Arm, Settings
from ampwise.data import to_device
from ampwise.numerics.explain.cause import Explanation
from ampwise.numerics.explain.causes import damaged, of_itself
from ampwise.numerics.observe.ancestry import Ancestor, back_from
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import Shadow, ShadowRun, shadowed
from ampwise.numerics.observe.trace import watch_update
from ampwise.numerics.observe.values import broken, origin_of, passed
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.places import placing
from ampwise.policy import Policy
from ampwise.step.recorder import finite
from ampwise.step.replay import Replay
from ampwise.step.replayable import Replayed
from ampwise.tasks import Task
from ampwise.tasks.checks import endless

_ALIKE = 0.9
"""Cosine between an update and the one that float64 makes, from which on they are alike."""


def in_update(task: Task, policy: Policy, settings: Settings, steps: int, found: Diagnosis) -> None:
    """Say of a parameter that is not finite which operation of the last update made it so.

    Changes `found` where the update is the culprit.

    Parameters
    ----------
    steps
        Number of that update.
    """

    if task.loss is None:
        found.notes.append(
            "The task's iteration makes its own updates: which of them made the parameter so was "
            "not looked for."
        )
        return

    def before(model: Callable[[], Any] = task.model) -> Arm:
        return _before(replace(task, model=model), policy, settings, steps)

    arm = before()
    root, name = watch_update(Replay(arm.step), arm.step.update)
    if root is None:
        return
    cause = of_itself(root) or _by_shadow(before(), root)
    found.phase, found.step = "optimizer", steps
    found.origin = replace(origin_of(root), module=name.rpartition(".")[0])
    found.extent, found.history, found.measured_scale = broken(root), passed(root.history), None
    found.cause = cause.cause
    found.explanation = (
        f"{cause.words} The update of step {steps} made it so: {root.name} turned finite "
        f"gradients and state into values of {name} that are not."
    )
    found.fixes = _fixes(before, task, root)


def _before(task: Task, policy: Policy, settings: Settings, steps: int) -> Arm:
    """A task trained as far as an update, which is still to be made."""
    arm = Arm(task, policy, settings)
    batches = endless(task)
    while arm.step.steps < steps - 1:
        arm.run(next(batches))
    while arm.step.position < settings.accumulate:
        batch = to_device(next(batches), arm.step.device)
        arm.iteration.again(arm.step, batch)
    return arm


def _by_shadow(arm: Arm, root: Root) -> Explanation:
    """The cause, from what the operation's inputs would be if the update rounded nothing."""
    place = replace(root.place, phase="forward")
    with placing(Replay(arm.step).models) as places:
        mode = Shadow(places, errors=False, at=(root.name, place, root.occurrence))
        shadowed(mode, arm.step.update)
    run = mode.seen(Replayed())
    return _lost_eps(root, run) or damaged(root, run)


def _lost_eps(root: Root, run: ShadowRun) -> Explanation | None:
    """A denominator of 0, whose eps is 0 in its format."""
    lost = next(
        (pair for maker in run.makers for each in back_from(maker) for pair in _added(each)), None
    )
    if lost is None or not any(bool((each == 0).any()) for each in _floats(root)):
        return None
    eps, by = lost
    fmt = formats.lookup(by.dtype)
    zeros = sum(int((each == 0).sum()) for each in _floats(root)[-1:])
    state = f" The state that it is added to is kept in {fmt}, too." if fmt.bits < 32 else ""
    return Explanation(
        "EPS_UNDERFLOW",
        f"{zeros} denominators of the optimizer are 0: its eps of {eps:g} is lost in {fmt}, whose "
        f"smallest number is {fmt.min_subnormal:.2g}.{state}",
    )


def _added(each: Ancestor) -> list[tuple[float, Ancestor]]:
    return [(constant, each) for constant in each.lost if constant < 1e-2]


def _floats(root: Root) -> list[Tensor]:
    return [each for each in root.args if isinstance(each, Tensor) and each.is_floating_point()]


def _fixes(before: Callable[..., Arm], task: Task, root: Root) -> list[Fix]:
    """A larger eps, and float32 parameters: each tried by making the update."""
    found: list[Fix] = []
    dtype = root.outputs[0].dtype if root.outputs else torch.float32
    if dtype not in (torch.float16, torch.bfloat16):
        how = "load the last checkpoint whose parameters are finite, and mend the optimizer"
        return [Fix("restore the parameters", how, verified=False, cost="not tried automatically")]
    whole = before(lambda: _in_float32(task.model()))
    whole.step.update()
    held = _finite(whole)
    found.append(
        Fix(
            "float32 parameters and optimizer state",
            "model.float() before the optimizer is made; autocast computes in 16 bits anyway",
            verified=held,
            cost="2 more bytes for each number that it keeps"
            if held
            else "tried: still not finite",
        )
    )
    arm = before()
    groups = [each for optimizer in Replay(arm.step).optimizers for each in optimizer.param_groups]
    if any("eps" in each for each in groups):
        found.append(_with_eps(before, arm, groups, dtype))
    return sorted(found, key=lambda fix: not fix.verified)


def _with_eps(
    before: Callable[..., Arm], arm: Arm, groups: list[dict[str, Any]], dtype: torch.dtype
) -> Fix:
    """The same update with an eps that the format has, beside the one that float64 makes."""
    eps = 2 * formats.lookup(dtype).min_normal if dtype == torch.float16 else 1e-6
    for each in groups:
        each["eps"] = eps
    old = [each.detach().double().clone() for each in _parameters(arm)]
    arm.step.update()
    made = [each.detach().double() - was for each, was in zip(_parameters(arm), old, strict=True)]
    ideal = [each - was for each, was in zip(_ideal(before()), old, strict=True)]
    cosine = _cosine(made, ideal)
    wrong = "still not finite" if not _finite(arm) else f"its update is off (cosine {cosine:.2f})"
    held = _finite(arm) and cosine >= _ALIKE
    return Fix(
        "a larger eps in the optimizer",
        f"eps={eps:.2g}, which {formats.lookup(dtype)} holds",
        verified=held,
        cost="nothing" if held else f"tried: {wrong}",
    )


def _ideal(arm: Arm) -> list[Tensor]:
    """Parameters after the update as float64 makes it."""
    with placing(Replay(arm.step).models) as places:
        mode = Shadow(places, errors=False, at=None)
        shadowed(mode, arm.step.update)
    wanted = [(mode.of(each.detach()), each) for each in _parameters(arm)]
    return [each.detach().double() if ideal is None else ideal for ideal, each in wanted]


def _cosine(some: list[Tensor], others: list[Tensor]) -> float:
    a, b = (torch.cat([each.flatten() for each in several]) for several in (some, others))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0, eps=0.0))


def _parameters(arm: Arm) -> list[nn.Parameter]:
    return list(Replay(arm.step).parameters().values())


def _finite(arm: Arm) -> bool:
    return all(map(finite, _parameters(arm)))


def _in_float32(made: Any) -> Any:
    """What a task's `model` gives, in float32."""
    if isinstance(made, nn.Module):
        return made.float()
    if isinstance(made, dict):
        return {name: each.float() for name, each in made.items()}
    return type(made)(each.float() for each in made)
