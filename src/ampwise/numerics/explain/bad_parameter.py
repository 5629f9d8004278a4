"""BAD_PARAMETER: a parameter that is inf or NaN before the step begins."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe.bits import NAN
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy.candidate import Candidate


def damaged_before(root: Root) -> str:
    """A tensor of the model, in words."""
    what = "NaN" if root.bits & NAN else "inf"
    return (
        f"The {root.source} holds {what} at the start of the step. It was damaged before: by an "
        "update, a checkpoint, or initialisation."
    )


def _by_itself(root: Root) -> Explanation | None:
    if root.func is not None or root.name != "parameter":
        return None
    return Explanation("BAD_PARAMETER", damaged_before(root))


def _remedies(_: Fault) -> list[Candidate]:
    how = "load the last checkpoint whose parameters are finite"
    return [Candidate("restore the parameters", how, tried=False)]


CAUSE = Cause("BAD_PARAMETER", _remedies, by_itself=_by_itself, in_code=False)
