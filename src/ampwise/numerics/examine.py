"""One window under examination: where it goes wrong, why, and what mends it.

    Stash -> Trace -> Explanation -> Candidates -> Fixes -> Diagnosis

reproduce  replay the window: the same loss, the same failure, or say so
benign     was only the loss scale too high?
origin     replay under watch                                   (`observe.trace`)
cause      experiments on the origin's inputs                   (`explain.causes`)
silent     no NaN anywhere: the step against its float64 shadow (`quiet`)
raised     an error in place of a value                         (`raised`)
fixes      each tried on the failing step                       (`remedy.fix`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ampwise.distributed.host_group import ALONE, HostGroup
from ampwise.numerics import quiet, raised
from ampwise.numerics.explain import nondeterministic, scale_too_high
from ampwise.numerics.explain.cause import Fault
from ampwise.numerics.explain.causes import CAUSES, explain, of_itself, remedies
from ampwise.numerics.inquiry import Inquiry, phase_of, poisoned
from ampwise.numerics.observe import compiled
from ampwise.numerics.observe.reference import Reference, reference
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.stagnation import Stagnant
from ampwise.numerics.observe.trace import BUFFER, Trace, watch
from ampwise.numerics.observe.values import broken, loss_of, origin_of, passed
from ampwise.numerics.progress import Progress, Silent
from ampwise.numerics.remedy import fix
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.places import NOWHERE
from ampwise.step.compiled import is_compiled
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed, lower_scales
from ampwise.telemetry.ring import StepRecord

_SETTLED = 4096.0
"""How far below the loss scale a backward is looked at that fails under lower ones, too."""


class Examiner:
    """Examines single windows of a step.

    Attributes
    ----------
    wanted
        What the last one should have given that fixes were tried on; None before that.
    """

    def __init__(self, step: Replayable, task: str, progress: Progress | None = None) -> None:
        self.step = step
        self.wanted: Reference | None = None
        self._inquiry = Inquiry(step, task, progress or Silent())

    def skipped(self) -> Diagnosis:
        """The window that was just skipped."""
        assert self.step.closed is not None
        return self.failure(self.step.closed)

    def failed(self) -> Diagnosis:
        """The window that is still open, whose loss is not finite."""
        assert self.step.open is not None
        return self.failure(self.step.open)

    def empty(self, stash: Stash) -> Diagnosis:
        """A diagnosis of a window that nobody has looked at yet."""
        return self._inquiry.opened(stash, stash.losses)

    def raised(self, error: Exception) -> Diagnosis | None:
        """A window that raised; None when it raises in float32 as well (a fault of the task)."""
        stash = self.step.open
        if stash is None or not self.step.policy.autocast:
            return None
        return raised.diagnosed(self._inquiry, stash, error)

    def quiet(
        self, stash: Stash, begun: StepRecord | None = None, stagnant: Stagnant | None = None
    ) -> Diagnosis:
        """A window that runs without NaN: is it right? Beside the first step, if that is known."""
        trace, histograms = self._inquiry.watched(stash)
        found = self._inquiry.opened(stash, trace.replayed.losses)
        found.step, found.histograms = self.step.steps, histograms
        if trace.target and self.step.scales_loss:
            stash = _settled(self.step, stash)
            trace = watch(self.step, stash)
        if trace.target:
            return self.failure(stash)
        self.wanted = quiet.compare(self._inquiry, found, stash, trace, stagnant, begun)
        return found

    def spoils(self, stash: Stash) -> Diagnosis | None:
        """A window that is finite, and leaves a buffer that is not; None where that is meant."""
        trace = watch(self.step, stash, backward=False, of_buffers=True)
        if trace.origin is None or trace.origin.func is None:
            return None
        meant = reference(self.step, stash).poisoned
        if trace.target.removeprefix(BUFFER) in meant:
            return None
        found = self._inquiry.opened(stash, trace.replayed.losses)
        shows = f" It stays in the {trace.target}, which later steps read."
        self._fault(found, stash, trace, trace.origin, shows)
        return found

    # -- a step that was skipped -------------------------------------------------------------------

    def settling(self, stash: Stash) -> bool:
        """Whether only the loss scale of a skipped window was too high."""
        losses = stash.losses or self.step.replay(stash).losses
        return self._only_the_scale(stash, losses)

    def failure(self, stash: Stash) -> Diagnosis:
        """A window with a non-finite loss or gradient."""
        step, progress = self.step, self._inquiry.progress
        progress.stage(f"step {stash.step} is not finite; replaying it")
        # A loss that is not finite says that it happened in forward.
        backward = all(map(finite, stash.losses))
        trace, histograms = self._inquiry.watched(stash, backward=backward)
        # Watched, a compiled model runs eagerly: whether it fails is seen without watching.
        eagerly = is_compiled(step.models)
        plain = step.replay(stash, backward=backward) if eagerly else trace.replayed
        found = self._inquiry.opened(stash, plain.losses)
        found.histograms = histograms
        if not self._reproduces(found, stash, plain) or plain.clean or plain.error is not None:
            return _not_reproduced(found, trace)
        if self._only_the_scale(stash, plain.losses):
            return self._benign(found, stash, trace)
        if step.scales_loss and found.loss is not None:
            # Backward fails under any scale; one that may itself be too high would hide where.
            stash = replace(stash, scale=(stash.scale / _SETTLED).clamp(min=1.0))
            trace = watch(step, stash)
        if trace.origin is None:
            found = _not_reproduced(found, trace)
            if eagerly:
                found.explanation = compiled.in_words(compiled.stages(step, stash))
            return found
        if eagerly:
            found.notes.append("The model is compiled; it fails in eager mode, too, shown here.")
        found.findings += poisoned(plain.poisoned)
        self._fault(found, stash, trace, trace.origin)
        return found

    def _fault(
        self, found: Diagnosis, stash: Stash, trace: Trace, root: Root, shows: str = ""
    ) -> None:
        """Why the origin of a trace broke, what mends it, and, if not at once, how it shows."""
        step, progress = self.step, self._inquiry.progress
        why = explain(step, stash, root)
        if isinstance(why.made_by, Root):
            root = why.made_by
        self._inquiry.explained(found, root, why, stash)
        found.explanation += shows
        found.path, found.target = trace.path, trace.target
        if why.cause != "BAD_PARAMETER":  # of which an update may turn out to be the cause
            progress.found(found)
        progress.stage("trying fixes on the step")
        wanted = self.wanted = reference(step, stash)
        assert found.origin is not None
        place = (why.made_by or root).place
        fault = Fault(step, stash, place, found.origin.dtype, found.origin.op, trace.spans)
        found.fixes = fix.tried(step, stash, remedies(why.cause, fault), wanted)
        if CAUSES[why.cause].of_precision:
            found.notes += _beyond_fixes(found.fixes, wanted, step)

    def _reproduces(self, found: Diagnosis, stash: Stash, plain: Replayed) -> bool:
        """Whether a replay gave the losses and gradients of the recorded step, bit for bit.

        Gradients may differ that two replays give differently, too: some kernels add up in another
        order each time. Which of them are not finite may not.
        """
        if not _same(stash.losses, plain.losses):
            return False
        if not stash.norms or not plain.norms or _equal(stash.norms, plain.norms):
            return True
        again = self.step.replay(stash)
        bad = [list(map(torch.isfinite, each.norms)) for each in (stash, plain, again)]
        if not _equal(bad[0], bad[1]) or not _equal(bad[1], bad[2]):
            return False
        if _equal(plain.norms, again.norms):
            return False
        found.notes.append(
            "Gradients differ from one replay to the next: kernels that are not deterministic. "
            "Which of them are not finite is the same each time."
        )
        return True

    def together(self, stash: Stash, ranks: HostGroup) -> Diagnosis:
        """A skipped window with collectives in it, which all ranks replay at the same time.

        Whatever they find, they make the same replays; so the cause is what the operation itself
        shows, and no fix is tried.
        """
        self._inquiry.progress.stage(f"step {stash.step} is not finite; replaying it on all ranks")
        found = self.empty(stash)
        found.notes.append(
            "Forward or loss talk to other ranks: all replayed the step together, and no fix was "
            "tried."
        )
        if self._only_the_scale(stash, stash.losses, ranks):
            _only_scaled(found)
            return found
        trace = watch(self.step, stash, once=True)
        root = trace.origin
        if root is None or not root.has_finite_inputs:  # what is bad here came from another rank
            found.status = "not_reproduced"
            found.explanation = "No operation on this rank made inf or NaN of finite values."
            return found
        found.path, found.target = trace.path, trace.target
        why = of_itself(root)
        if why is not None:
            self._inquiry.explained(found, root, why, stash)
        else:
            found.status, found.phase, found.origin = "fault", phase_of(root), origin_of(root)
            found.explanation = f"{root.name} makes inf or NaN of finite values."
            self._inquiry.evidence(found, root, stash)
        return found

    def _only_the_scale(
        self, stash: Stash, losses: Sequence[Tensor], ranks: HostGroup = ALONE
    ) -> bool:
        """Whether the same window is clean, on all of some ranks, under a lower loss scale.

        As low as it comes to by itself. They make the same replays at the same time.
        """
        known = ranks.all(lambda: loss_of(list(losses)) is not None)
        if not self.step.scales_loss or not all(known):
            return False
        return any(
            all(ranks.all(lambda scale=scale: self.step.replay(stash, scale=scale).clean))
            for scale in lower_scales(self.step, stash)
        )

    def _benign(self, found: Diagnosis, stash: Stash, trace: Trace) -> Diagnosis:
        _only_scaled(found)
        found.target = trace.target
        if trace.origin is not None:
            found.phase, found.origin = trace.origin.place.phase, origin_of(trace.origin)
            found.extent, found.history = broken(trace.origin, stash), passed(trace.origin.history)
            found.measured_scale = found.loss_scale
            found.path = trace.path
        place = NOWHERE if trace.origin is None else trace.origin.place
        mends = remedies("SCALE_TOO_HIGH", Fault(self.step, stash, place))
        found.fixes = fix.tried(self.step, stash, mends, None)
        return found


def _same(recorded: Sequence[Tensor], replayed: Sequence[Tensor]) -> bool:
    """Whether losses are equal; a window that was not recorded has nothing to compare."""
    both = min(len(recorded), len(replayed))
    return _equal(recorded[:both], replayed[:both])


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return len(some) == len(others) and all(
        torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))
        for a, b in zip(some, others, strict=True)
    )


def _not_reproduced(found: Diagnosis, trace: Trace) -> Diagnosis:
    if trace.replayed.error is not None:
        found.notes.append(f"watching the replay failed: {trace.replayed.error}")
    found.status, found.cause = "not_reproduced", "NONDETERMINISTIC"
    found.explanation = nondeterministic.WORDS
    return found


def _only_scaled(found: Diagnosis) -> None:
    found.status, found.cause = "benign", "SCALE_TOO_HIGH"
    found.explanation = scale_too_high.in_words(found.loss_scale or 1.0)


def _beyond_fixes(fixes: Sequence[Fix], wanted: Reference, step: Replayable) -> list[str]:
    """What to say where another precision is of no use, or no fix held."""
    if not wanted.float32:
        return ["float32 itself fails on this step: another precision alone does not mend it."]
    if step.policy.autocast and not any(each.verified for each in fixes):
        return [
            "No fix held by itself; ampwise tune looks for a set of modules to keep in float32."
        ]
    return []


def _settled(step: Replayable, stash: Stash) -> Stash:
    """The same window under a loss scale that has settled."""
    scales = [float(stash.scale), *lower_scales(step, stash, by=2)]
    settled = next((e for e in scales if step.replay(stash, scale=e).clean), scales[-1])
    return Stash(stash.step, torch.full_like(stash.scale, settled), stash.micro_batches)
