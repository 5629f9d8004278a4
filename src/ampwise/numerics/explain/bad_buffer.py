"""BAD_BUFFER: a buffer, such as a running statistic, that is inf or NaN before the step begins."""

from __future__ import annotations

from functools import partial

from ampwise.numerics.explain.bad_parameter import damaged_before
from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate

_SHOWN = 4


def _by_itself(root: Root) -> Explanation | None:
    return Explanation("BAD_BUFFER", damaged_before(root)) if root.func is None else None


def _remedies(fault: Fault) -> list[Candidate]:
    """Running statistics begin anew; another buffer has to be right where it is made."""
    found: list[Candidate] = []
    if modules := change.with_bad_statistics(fault.step.models):
        names = ", ".join(f"{name}.reset_running_stats()" for name in list(modules)[:_SHOWN])
        found.append(
            Candidate("restore the buffers", f"call {names}",
                      partial(change.fresh_statistics, list(modules.values())))
        )  # fmt: skip
    bad = list(change.bad_buffers(fault.step.models).items())
    if named := "; ".join(f"{name}: {where}" for name, where in bad[:_SHOWN]):
        made = "its constructor or a checkpoint" if fault.stash.step == 1 else "an update of it"
        found.append(
            Candidate("make the buffer finite where it is made", f"{named}; look at {made}",
                      tried=False)
        )  # fmt: skip
    return found


CAUSE = Cause("BAD_BUFFER", _remedies, by_itself=_by_itself, in_code=False)
