"""SCALE_TOO_HIGH: a backward that is clean under a lower loss scale."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Fault
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.step.replayable import lower_scales
from ampwise_lint.base.words import power


def in_words(scale: float) -> str:
    """What is said of it."""
    return (
        f"Only the loss scale of {power(scale)} was too high: the gradients of this step are "
        "finite under a lower one. The scale settles by itself, at the price of the skipped step."
    )


def _remedies(fault: Fault) -> list[Candidate]:
    """The largest power of two below the scale at which the step is clean."""
    step, stash = fault.step, fault.stash
    scale = float(stash.scale)
    for scale in lower_scales(step, stash, by=2):
        if step.replay(stash, scale=scale).clean:
            break
    lower = Candidate(
        "a lower initial loss scale",
        f"{step.how_scaled(scale)}; left alone it settles by itself",
        scale=scale,
    )
    return [lower, *fault.in_bfloat16()]


CAUSE = Cause("SCALE_TOO_HIGH", _remedies, in_code=False)
