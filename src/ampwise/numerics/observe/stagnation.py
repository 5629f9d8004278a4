"""Weights that an update did not move: in 16 bits, a step below half of their ULP is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ampwise.formats import dtype_name
from ampwise.numerics.observe.narrow import Maker
from ampwise.places import Place
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
    made
        The line that makes most of these elements 16 bits, by parameter; empty if none is known.
    by
        The line of the user's own update; None of one of torch's.
    """

    share: dict[str, float]
    dtype: str
    still: int = 0
    pushed: int = 0
    made: Mapping[str, Maker] = field(default_factory=dict[str, Maker])
    by: Place | None = None


def weights_of(step: Replayable) -> dict[str, Tensor]:
    """Copies of what the optimizers hold, by parameter name."""
    return {name: each.detach().clone() for name, each in step.parameters().items()}


def stagnant(step: Replayable, before: dict[str, Tensor], record: StepRecord) -> Stagnant | None:
    """16-bit weights most of which did not move, though the window's step was made."""
    if record.skipped or not record.lr > 0 or not record.grad_norm > 0:
        return None
    if step.closed is None or step.policy.pure:  # whose rounding loses nothing on average
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
            share[name], dtype = still / count, dtype_name(now.dtype)
            stayed, all_pushed = stayed + still, all_pushed + count
    return Stagnant(share, dtype, stayed, all_pushed) if share else None
