"""SCALE_TOO_HIGH: a backward that is clean under a lower loss scale."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Fault
from ampwise.numerics.remedy.candidate import Candidate
from ampwise_lint.base.words import power


def in_words(scale: float) -> str:
    """What is said of it."""
    return (
        f"Only the loss scale of {power(scale)} was too high: the gradients of this step are "
        "finite under a lower one. The scale settles by itself, at the price of the skipped step."
    )


def _remedies(fault: Fault) -> list[Candidate]:
    """The largest power of two below the scale at which the step is clean."""
    scale = float(fault.stash.scale)
    while scale > fault.step.least_scale:
        scale /= 2
        if fault.step.replay(fault.stash, scale=scale).clean:
            break
    lower = Candidate(
        "a lower initial loss scale",
        f"{fault.step.how_scaled(scale)}; left alone it settles by itself",
        scale=scale,
    )
    return [lower, *fault.in_bfloat16()]


CAUSE = Cause("SCALE_TOO_HIGH", _remedies, in_code=False)
