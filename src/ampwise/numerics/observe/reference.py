"""What a step should have given: the float64 shadow of the step, run in float32.

No bound on it is absolute: a gradient of norm 1e-19 is as good as any, and has to be there. It is
taken for a zero in exact arithmetic only where it is small beside the loss *and* float32 does not
confirm it: then what is there is the rounding of float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.policy import PRESETS
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed

_NO_GRADIENT = 1e-9
"""Norm of the gradient, beside the loss, below which it may be zero in exact arithmetic."""
_CONFIRMED_DB = 10.0
"""SQNR of float32's gradient above which it is there."""


@dataclass(frozen=True)
class Reference:
    """What the step should have given: losses and true gradients in high precision.

    Attributes
    ----------
    terms
        Size of the terms that each loss is the sum of.
    float32
        Whether the step is finite in float32, where it runs there.
    confirmed_db
        SQNR of the gradient that the step has in float32.
    within
        By how much float32 itself misses each loss.
    poisoned
        Buffers with inf or NaN in them at its end.
    """

    losses: list[float]
    terms: list[float]
    gradients: dict[str, Tensor]
    float32: bool = True
    confirmed_db: float = -math.inf
    within: list[float] = field(default_factory=list[float])
    poisoned: list[str] = field(default_factory=list[str])

    @cached_property
    def finite(self) -> bool:
        """Whether it can be compared with."""
        return all(map(math.isfinite, self.losses)) and all(map(finite, self.gradients.values()))

    def is_zero(self, norm: float) -> bool:
        """Whether gradients of this norm, the reference's own, are zero but for rounding."""
        if norm < _NO_GRADIENT * max(self.terms, default=0.0):
            return self.confirmed_db < _CONFIRMED_DB
        return norm == 0


def reference(step: Replayable, stash: Stash) -> Reference:
    """Losses and true gradients of a window in float64."""
    # Beside a float32 run: branches of the code follow its values, and these are sound. Sorts and
    # choices follow none.
    run = shadow(step, stash, errors=False, decides=True, policy=PRESETS["fp32"], scale=1.0)
    if run.replayed.error is None:
        wanted = _of_run(replace(stash, scale=torch.ones(())), run)
        pairs = zip(run.replayed.losses, wanted.losses, strict=True)
        return replace(
            wanted,
            float32=run.replayed.clean,
            confirmed_db=gradient_errors(run.replayed, wanted, 1.0).sqnr_db,
            within=[_missed(float(loss), ideal) for loss, ideal in pairs],
            poisoned=run.poisoned,
        )
    # 16-bit parameters
    return _of_run(stash, shadow(step, stash, errors=False, decides=True))


def _missed(loss: float, ideal: float) -> float:
    """By how much float32 misses a loss; 0 where it has none that could excuse anything."""
    return abs(loss - ideal) if math.isfinite(loss) else 0.0


def _of_run(stash: Stash, run: ShadowRun) -> Reference:
    """Losses and true gradients of a shadow run that came to its end."""
    gradients = {name: each / float(stash.scale) for name, each in run.gradients.items()}
    return Reference([float(each) for each in run.losses], run.terms, gradients)


def gradient_errors(result: Replayed, wanted: Reference, scale: float) -> GradientErrors:
    """The true gradients of a replay beside those it should have given."""
    return GradientErrors(result.gradients, wanted.gradients, scale)
