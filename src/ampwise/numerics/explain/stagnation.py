"""Updates that move nothing: 16-bit weights, and steps below half of their ULP."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ampwise.numerics.observe.places import Place
from ampwise.numerics.observe.values import at
from ampwise.numerics.result import percent
from ampwise.step.replayable import Replayable
from ampwise.telemetry.ring import StepRecord

_HALF_BYTES = 2


@dataclass(frozen=True)
class Stagnant:
    """Weights that an update did not move.

    Attributes
    ----------
    share
        Of all elements with a non-zero gradient, those that stayed as they were, by parameter.
    still, pushed
        How many stayed, of how many, in these parameters.
    """

    share: dict[str, float]
    dtype: str
    still: int = 0
    pushed: int = 0


def weights_of(step: Replayable) -> dict[str, Tensor]:
    """Copies of what the optimizers hold, by parameter name."""
    return {name: each.detach().clone() for name, each in step.parameters().items()}


def stagnant(step: Replayable, before: dict[str, Tensor], record: StepRecord) -> Stagnant | None:
    """16-bit weights most of which did not move, though the window's step was made."""
    if record.skipped or not record.lr > 0 or not record.grad_norm > 0:
        return None
    if step.closed is None:
        return None
    touched = step.replay(step.closed).gradients
    share: dict[str, float] = {}
    dtype, stayed, all_pushed = "", 0, 0
    parameters = step.parameters()
    for name, old in before.items():
        now = parameters[name].detach()
        gradient = touched.get(name)
        if gradient is None or gradient.is_sparse or now.element_size() > _HALF_BYTES:
            continue
        pushed = gradient != 0
        if not bool(pushed.any()):
            continue
        still, count = int(((now == old) & pushed).sum()), int(pushed.sum())
        if still > 0.5 * count:
            share[name], dtype = still / count, str(now.dtype).removeprefix("torch.")
            stayed, all_pushed = stayed + still, all_pushed + count
    return Stagnant(share, dtype, stayed, all_pushed) if share else None


def in_words(stagnant: Stagnant, step: Replayable) -> tuple[str, Any]:
    """An explanation, and where it is."""
    named = ", ".join(
        f"{name} {percent(share)}" for name, share in list(stagnant.share.items())[:6]
    )
    rate = float(step.optimizers[0].param_groups[0]["lr"])
    text = (
        f"Updates are lost: of the weights that have a gradient, most did not move in this step "
        f"({named}). At a learning rate of {rate:g} the update is below half an ULP of a "
        f"{stagnant.dtype} weight and rounds to nothing."
    )
    name = next(iter(stagnant.share))
    place = Place("forward", name.rpartition(".")[0], 0, "", 0)
    return text, at(place, "optimizer.step", stagnant.dtype)


def moves_in_float32(step: Replayable) -> bool:
    """Whether the same update, made on float32 copies, moves most weights."""
    assert step.closed is not None
    gradients = step.replay(step.closed).gradients
    scale = float(step.closed.scale)
    held = {id(each): name for name, each in step.parameters().items()}
    original = step.optimizers[0]
    twin, pushed = copy.deepcopy(original), list[nn.Parameter]()
    twin.state.clear()
    for group, own in zip(twin.param_groups, original.param_groups, strict=True):
        group["params"] = [_in_float32(each, gradients.get(held.get(id(each), "")), scale)
                           for each in own["params"]]  # fmt: skip
        pushed += [each for each in group["params"] if each.grad is not None]
    before = [each.detach().clone() for each in pushed]
    twin.step()
    moved = total = 0
    for parameter, old in zip(pushed, before, strict=True):
        assert parameter.grad is not None
        touched = parameter.grad != 0
        moved += int(((parameter != old) & touched).sum())
        total += int(touched.sum())
    return total > 0 and moved > 0.5 * total


def _in_float32(parameter: Tensor, gradient: Tensor | None, scale: float) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach().float().clone())
    if gradient is not None and not gradient.is_sparse:
        twin.grad = gradient.float() / scale
    return twin
