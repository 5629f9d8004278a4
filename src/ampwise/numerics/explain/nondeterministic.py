"""NONDETERMINISTIC: a replay that does not give what the step gave."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Fault
from ampwise.numerics.remedy.candidate import Candidate

WORDS = (
    "Replaying the step from its batch, random state and buffers did not fail in the same way. "
    "Something else takes part: nondeterministic kernels, batches changed in place, or state "
    "outside the model."
)


def _remedies(_: Fault) -> list[Candidate]:
    """Nothing can be tried on a step that cannot be run again."""
    return []


CAUSE = Cause("NONDETERMINISTIC", _remedies, in_code=False)
