"""A step without NaN, held against its float64 shadow, and against what it should have moved."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.numerics.explain import stagnation
from ampwise.numerics.explain.cause import Fault
from ampwise.numerics.explain.causes import explain, remedies
from ampwise.numerics.explain.silent import Lost, silent_faults
from ampwise.numerics.inquiry import Inquiry, origin_by, poisoned, worst
from ampwise.numerics.observe.reference import Reference, reference
from ampwise.numerics.observe.stagnation import Stagnant
from ampwise.numerics.observe.trace import Trace
from ampwise.numerics.observe.values import at, broken, passed
from ampwise.numerics.remedy import fix, master_weights
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.result import CauseName, Diagnosis, Extent, Finding, Fix, Origin
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise.telemetry.ring import StepRecord
from ampwise_lint.base.words import power


def compare(
    inquiry: Inquiry, found: Diagnosis, stash: Stash, trace: Trace,
    stagnant: Stagnant | None, begun: StepRecord | None,
) -> Reference:  # fmt: skip
    """Fill in a diagnosis of a window that is finite throughout; what it should have given."""
    step = inquiry.step
    lost, run, errors = silent_faults(step, stash, trace, begun)
    found.worst_ops = worst(run)
    if run.replayed.error is None:
        found.notes.append(f"SQNR of the gradient against float64: {errors.sqnr_db:z.0f} dB")
    wanted = reference(step, stash)
    mending = _Mending(inquiry, stash, wanted, trace.spans)
    severe = [each for each in lost if each.severe]
    found.notes += [each.explanation for each in lost if not each.severe]
    if stagnant is not None and stagnant.share:
        found.status, found.phase, found.cause = "fault", "optimizer", "STAGNATION"
        found.explanation, found.origin = stagnation.in_words(stagnant, step)
        found.extent = Extent(stagnant.still, stagnant.pushed)
        inquiry.progress.found(found)
        found.fixes = [master_weights.tried(step)]
    elif severe:
        _tell(found, severe.pop(0), mending)
    found.findings += [_finding(each, mending) for each in severe]
    found.findings += poisoned(trace.replayed.poisoned)
    return wanted


class _Mending:
    """Causes of silent faults of one step, and fixes that are tried on it."""

    def __init__(
        self, inquiry: Inquiry, stash: Stash, wanted: Reference, spans: Sequence[Place]
    ) -> None:
        self.inquiry, self.stash = inquiry, stash
        self._wanted, self._spans = wanted, spans

    def explained(self, lost: Lost) -> tuple[CauseName, str, Origin]:
        """Cause, explanation and origin."""
        if lost.root is not None:
            why = explain(self.inquiry.step, self.stash, lost.root)
            return why.cause, f"{why.words} {lost.explanation}", origin_by(lost.root, why)
        assert lost.cause is not None
        return lost.cause, lost.explanation, at(lost.place, lost.op, lost.dtype)

    def fixes(self, lost: Lost, cause: CauseName) -> list[Fix]:
        """What may mend it, tried."""
        step = self.inquiry.step
        fault = Fault(step, self.stash, lost.place, lost.dtype, lost.op, self._spans)
        found = remedies(cause, fault)
        if lost.scale is not None:
            on = "" if step.scales_loss else "switch loss scaling on (policy fp16): "
            scaled = Candidate(
                f"a loss scale of {power(lost.scale)}",
                f"{on}{step.how_scaled(lost.scale)}",
                scale=lost.scale,
            )
            found = [scaled, *found]
        return fix.tried(step, self.stash, found, self._wanted)


def _tell(found: Diagnosis, lost: Lost, mending: _Mending) -> None:
    """Make the gravest silent fault the diagnosis."""
    cause, explanation, origin = mending.explained(lost)
    found.status, found.cause, found.explanation = "fault", cause, explanation
    found.extent, found.history = lost.extent, list(lost.history)
    if lost.root is not None:
        found.extent, found.history = broken(lost.root, mending.stash), passed(lost.root.history)
    found.phase, found.origin = lost.place.phase, origin
    mending.inquiry.progress.found(found)
    mending.inquiry.progress.stage("trying fixes on the step")
    found.fixes = mending.fixes(lost, cause)


def _finding(lost: Lost, mending: _Mending) -> Finding:
    cause, explanation, origin = mending.explained(lost)
    return Finding(cause, explanation, lost.place.phase, origin, mending.fixes(lost, cause))
