"""When skipped steps stop being normal: abort with an explanation instead of training on nothing.

Skipping is how the loss scale settles: from 2**16 down to its floor takes 30 skipped steps in a row
at most. The default limit, 50, is beyond that, so settling never aborts and needs no exception.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampwise.errors import SkippedStepsError
from ampwise.telemetry.ring import StepRecord


class Patience:
    """Counts skipped steps in a row."""

    def __init__(self, max_skips: int) -> None:
        self.max_skips = max_skips
        self.in_a_row = 0

    def note(self, skipped: bool) -> None:
        """Take in a step's outcome."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0

    @property
    def exhausted(self) -> bool:
        """Whether the limit is reached."""
        return self.in_a_row >= self.max_skips


def explain(history: Sequence[StepRecord], in_a_row: int, *, scaled: bool) -> SkippedStepsError:
    """The error that says what was seen in a run of skipped steps, and what to do."""
    run = history[-in_a_row:]
    first, last = run[0], run[-1]
    where = f"steps {first.step} to {last.step} were all skipped: gradients inf or NaN"
    if scaled:
        where += f", whatever the loss scale ({first.loss_scale:g} down to {last.loss_scale:g})"
    if math.isfinite(last.loss):
        cause = (
            f"the loss is finite ({last.loss:.4g}), so backward breaks: look for sqrt, norm, "
            "division or log near zero, or keep the module in float32"
        )
    else:
        cause = (
            f"the loss itself is {last.loss:g}, so forward breaks: look at the batch of step "
            f"{first.step} and at values beyond the format's range, or try bf16"
        )
    kept = f"parameters are as after step {first.step - 1}"
    return SkippedStepsError(f"{where}; {cause}; {kept}")
