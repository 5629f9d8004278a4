"""One window under examination: where it goes wrong, why, and what mends it.

reproduce  replay the window: the same loss, the same failure, or say so
benign     was only the loss scale too high?
origin     replay under watch                                   (`trace`)
cause      experiments on the origin's inputs                   (`cause`)
silent     no NaN anywhere: the step against its float64 shadow (`silent`)
fixes      each tried on the failing step                       (`fix`)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ampwise import formats
from ampwise.distributed.host_group import ALONE, HostGroup
from ampwise.errors import kind_and_words
from ampwise.numerics.explain import stagnation
from ampwise.numerics.explain.cause import Finding as Cause
from ampwise.numerics.explain.cause import (
    constant_beyond,
    explain,
    in_float64,
    of_itself,
)
from ampwise.numerics.explain.silent import Lost, silent_faults
from ampwise.numerics.explain.stagnation import Stagnant
from ampwise.numerics.observe import compiled
from ampwise.numerics.observe.bits import bad_bits, extreme_of
from ampwise.numerics.observe.places import NOWHERE, Phase, Place, is_internal
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import ShadowRun
from ampwise.numerics.observe.trace import Trace, watch
from ampwise.numerics.observe.values import at, broken, exponents, loss_of, origin_of, passed
from ampwise.numerics.remedy import fix
from ampwise.numerics.remedy.candidates import FLOAT32_CAUSES, Candidate, candidates
from ampwise.numerics.result import Diagnosis, Extent, Finding, Fix, OpError, Origin, Passed
from ampwise.policy import PRESETS
from ampwise.step.compiled import is_compiled
from ampwise.step.recorder import Stash, finite
from ampwise.step.replay import let_go
from ampwise.step.replayable import Replayable, Replayed
from ampwise.telemetry.environment import environment
from ampwise.telemetry.ring import StepRecord
from ampwise_lint.base.words import power

_WORST = 10
_MODULES = 48
_SETTLED = 4096.0
"""How far below the loss scale a backward is looked at that fails under lower ones, too."""


class Progress(Protocol):
    """Who wants to know how far a diagnosis is."""

    def step(self, number: int, planned: int, loss: float) -> None:
        """A step was made."""

    def stage(self, what: str) -> None:
        """What is being done now."""

    def found(self, diagnosis: Diagnosis) -> None:
        """Cause and evidence are known; fixes are still to be tried."""


class Silent:
    """Nobody wants to know."""

    def step(self, number: int, planned: int, loss: float) -> None:
        """Nothing."""

    def stage(self, what: str) -> None:
        """Nothing."""

    def found(self, diagnosis: Diagnosis) -> None:
        """Nothing."""


class Examiner:
    """Examines single windows of a step."""

    def __init__(self, step: Replayable, task: str, progress: Progress | None = None) -> None:
        self.step = step
        self._task = task
        self._progress = progress or Silent()

    # -- a step that was skipped -------------------------------------------------------------------

    def skipped(self) -> Diagnosis:
        """The window that was just skipped."""
        assert self.step.closed is not None
        return self.failure(self.step.closed)

    def failed(self) -> Diagnosis:
        """The window that is still open, whose loss is not finite."""
        assert self.step.open is not None
        return self.failure(self.step.open)

    def settling(self, stash: Stash) -> bool:
        """Whether only the loss scale of a skipped window was too high."""
        losses = stash.losses or self.step.replay(stash).losses
        return self._only_the_scale(stash, losses)

    def failure(self, stash: Stash) -> Diagnosis:
        """A window with a non-finite loss or gradient."""
        step = self.step
        self._progress.stage(f"step {stash.step} is not finite; replaying it")
        # A loss that is not finite says that it happened in forward.
        backward = all(map(finite, stash.losses))
        trace, histograms = self._watched(stash, backward=backward)
        # Watched, a compiled model runs eagerly: whether it fails is seen without watching.
        eagerly = is_compiled(step.models)
        plain = step.replay(stash, backward=backward) if eagerly else trace.replayed
        found = self._new(stash, plain.losses)
        found.histograms = histograms
        if not self._reproduces(found, stash, plain) or plain.clean or plain.error is not None:
            return _not_reproduced(found, trace)
        if self._only_the_scale(stash, plain.losses):
            return self._benign(found, stash, trace)
        if step.scales_loss and found.loss is not None:
            # Backward fails under any scale; one that may itself be too high would hide where.
            stash = replace(stash, scale=(stash.scale / _SETTLED).clamp(min=1.0))
            trace = watch(step, stash)
        root = trace.origin
        if root is None:
            found = _not_reproduced(found, trace)
            if eagerly:
                found.explanation = compiled.in_words(compiled.stages(step, stash))
            return found
        if eagerly:
            found.notes.append("The model is compiled; it fails in eager mode, too, shown here.")
        cause = explain(step, stash, root)
        if isinstance(cause.made_by, Root):
            root = cause.made_by
        found.status = "fault"
        found.phase = _phase_of(root)
        made_by = cause.made_by or root
        place = made_by.place
        found.origin = _origin(root, cause)
        found.cause, found.explanation = cause.cause, cause.explanation
        self._evidence(found, root, stash)
        found.path, found.target = trace.path, trace.target
        found.findings += _poisoned(plain.poisoned)
        self._progress.found(found)
        self._progress.stage("trying fixes on the step")
        wanted = fix.reference(step, stash)
        mends = candidates(step, stash, cause.cause, place, found.origin.dtype, found.origin.op,
                           trace.spans)  # fmt: skip
        found.fixes = fix.tried(step, stash, mends, wanted)
        if cause.cause in FLOAT32_CAUSES:
            found.notes += _beyond_fixes(found.fixes, wanted, step)
        return found

    def _evidence(self, found: Diagnosis, root: Root, stash: Stash) -> None:
        """Which part broke, what it was before, and under which loss scale that was measured."""
        found.extent, found.history = broken(root, stash), passed(root.history)
        ideal = in_float64(root) if root.func is not None and found.origin is not None else None
        if ideal is not None and not any(map(bad_bits, ideal)):
            place = root.place
            found.history.append(
                Passed(root.name, place.module, place.file, place.line, place.phase, "float64",
                       extreme_of(ideal))
            )  # fmt: skip
        if root.place.phase == "backward" and self.step.scales_loss:
            found.measured_scale = float(stash.scale)
            found.explanation += f" Measured under a loss scale of {power(float(stash.scale))}."

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
        self._progress.stage(f"step {stash.step} is not finite; replaying it on all ranks")
        found = self.empty(stash)
        found.notes.append(
            "Forward or loss talk to other ranks: all replayed the step together, and no fix was "
            "tried."
        )
        if self._only_the_scale(stash, stash.losses, ranks):
            found.status, found.cause = "benign", "SCALE_TOO_HIGH"
            found.explanation = _scale_in_words(found)
            return found
        trace = watch(self.step, stash, once=True)
        root = trace.origin
        if root is None or not root.has_finite_inputs:  # what is bad here came from another rank
            found.status = "not_reproduced"
            found.explanation = "No operation on this rank made inf or NaN of finite values."
            return found
        cause = of_itself(root)
        found.status, found.phase = "fault", _phase_of(root)
        found.path, found.target = trace.path, trace.target
        found.origin = origin_of(root)
        found.explanation = f"{root.name} makes inf or NaN of finite values."
        if cause is not None:
            found.origin = _origin(root, cause)
            found.cause, found.explanation = cause.cause, cause.explanation
        self._evidence(found, root, stash)
        return found

    def _only_the_scale(
        self, stash: Stash, losses: Sequence[Tensor], ranks: HostGroup = ALONE
    ) -> bool:
        """Whether the same window is clean, on all of some ranks, under a loss scale of 1 or more.

        They make the same replays at the same time.
        """
        known = ranks.all(lambda: loss_of(list(losses)) is not None)
        if not self.step.scales_loss or not all(known):
            return False
        scale = float(stash.scale)
        while scale > 1.0:
            scale = max(1.0, scale / 16)
            if all(ranks.all(lambda scale=scale: self.step.replay(stash, scale=scale).clean)):
                return True
        return False

    def _benign(self, found: Diagnosis, stash: Stash, trace: Trace) -> Diagnosis:
        found.status, found.cause = "benign", "SCALE_TOO_HIGH"
        found.target = trace.target
        if trace.origin is not None:
            found.phase, found.origin = trace.origin.place.phase, origin_of(trace.origin)
            found.extent, found.history = broken(trace.origin, stash), passed(trace.origin.history)
            found.measured_scale = found.loss_scale
            found.path = trace.path
        place = NOWHERE if trace.origin is None else trace.origin.place
        mends = candidates(self.step, stash, "SCALE_TOO_HIGH", place)
        found.fixes = fix.tried(self.step, stash, mends, None)
        found.explanation = _scale_in_words(found)
        return found

    # -- a step that raised ------------------------------------------------------------------------

    def raised(self, error: Exception) -> Diagnosis | None:
        """A window that raised; None when it raises in float32 as well (a fault of the task)."""
        stash = self.step.open
        if stash is None or not self.step.policy.autocast:
            return None
        let_go(error)
        self.step.rewind_buffers()
        if self.step.replay(stash, policy=PRESETS["fp32"], scale=1.0).error is not None:
            return None
        trace = watch(self.step, stash)
        found = self._new(stash, trace.replayed.losses)
        message = kind_and_words(error).rstrip(".")  # our sentence goes on, or ends, after it
        if trace.before_error is None:
            place = self._refused(found, error, trace.failed, message)
        else:
            place = self._noticed(found, stash, trace.before_error, message)
        self._progress.found(found)
        wanted = fix.reference(self.step, stash)
        assert found.cause is not None
        assert found.origin is not None
        where = found.origin
        mends = candidates(self.step, stash, found.cause, place, where.dtype, where.op)
        found.fixes = fix.tried(self.step, stash, mends, wanted)
        return found

    def _noticed(self, found: Diagnosis, stash: Stash, root: Root, message: str) -> Place:
        """An error that says that something is not finite: what made it so."""
        cause = explain(self.step, stash, root)
        found.status, found.cause, found.origin = "fault", cause.cause, _origin(root, cause)
        found.explanation = f"{cause.explanation} The step then raises {message}."
        self._evidence(found, root, stash)
        place = (cause.made_by or root).place
        found.phase = place.phase
        return place

    def _refused(
        self, found: Diagnosis, error: Exception, root: Root | None, message: str
    ) -> Place:
        """An error in this precision that no bad value came before."""
        place = _place_of(error, "forward") if root is None else root.place
        found.status, found.phase = "fault", place.phase
        found.origin = at(place, type(error).__name__) if root is None else origin_of(root)
        constant = None if root is None else constant_beyond(root, formats.lookup("float16"))
        if root is not None and constant is not None:
            found.cause = "MASK_CONSTANT"
            found.explanation = (
                f"The constant {constant:g} does not fit into {self.step.policy.compute_dtype}, "
                f"and {root.name} raises {message}. In float32 it is finite."
            )
        else:
            found.cause = "DTYPE_ERROR"
            found.explanation = (
                f"Under {self.step.policy.text} this raises {message}. In float32 the same step "
                "runs."
            )
        return place

    # -- a step without NaN ------------------------------------------------------------------------

    def quiet(
        self, stash: Stash, stagnant: Stagnant | None = None, begun: StepRecord | None = None
    ) -> Diagnosis:
        """A window that runs without NaN: is it right? Beside the first step, if that is known."""
        trace, histograms = self._watched(stash)
        found = self._new(stash, trace.replayed.losses)
        found.step, found.histograms = self.step.steps, histograms
        if trace.target and self.step.scales_loss:
            stash = _settled(self.step, stash)
            trace = watch(self.step, stash)
        if trace.target:
            return self.failure(stash)
        lost, run, errors = silent_faults(self.step, stash, trace, begun)
        found.worst_ops = _worst(run)
        found.notes.append(f"SQNR of the gradient against float64: {errors.sqnr_db:.0f} dB")
        wanted = fix.reference(self.step, stash)
        severe = [each for each in lost if each.severe]
        found.notes += [each.explanation for each in lost if not each.severe]
        if stagnant is not None and stagnant.share:
            found.status, found.phase, found.cause = "fault", "optimizer", "STAGNATION"
            found.explanation, found.origin = stagnation.in_words(stagnant, self.step)
            found.extent = Extent(stagnant.still, stagnant.pushed)
            self._progress.found(found)
            found.fixes = self._stagnation_fixes()
        elif severe:
            self._tell(found, severe.pop(0), stash, wanted, trace.spans)
        found.findings += [self._finding(each, stash, wanted, trace.spans) for each in severe]
        found.findings += _poisoned(trace.replayed.poisoned)
        return found

    def _tell(
        self, found: Diagnosis, lost: Lost, stash: Stash, wanted: fix.Reference,
        spans: Sequence[Place],
    ) -> None:  # fmt: skip
        """Make the gravest silent fault the diagnosis."""
        cause, explanation, origin = self._explained(lost, stash)
        found.status, found.cause, found.explanation = "fault", cause, explanation
        found.extent, found.history = lost.extent, list(lost.history)
        if lost.root is not None:
            found.extent, found.history = broken(lost.root, stash), passed(lost.root.history)
        found.phase, found.origin = lost.place.phase, origin
        self._progress.found(found)
        self._progress.stage("trying fixes on the step")
        found.fixes = self._silent_fixes(lost, cause, stash, wanted, spans)

    def _finding(
        self, lost: Lost, stash: Stash, wanted: fix.Reference, spans: Sequence[Place]
    ) -> Finding:
        cause, explanation, origin = self._explained(lost, stash)
        fixes = self._silent_fixes(lost, cause, stash, wanted, spans)
        return Finding(cause, explanation, lost.place.phase, origin, fixes)

    def _explained(self, lost: Lost, stash: Stash) -> tuple[str, str, Any]:
        if lost.root is None:
            return lost.cause, lost.explanation, at(lost.place, lost.op, lost.dtype)
        cause = explain(self.step, stash, lost.root)
        return cause.cause, f"{cause.explanation} {lost.explanation}", _origin(lost.root, cause)

    def _silent_fixes(
        self, lost: Lost, cause: str, stash: Stash, wanted: fix.Reference, spans: Sequence[Place]
    ) -> list[Fix]:
        found = candidates(self.step, stash, cause, lost.place, lost.dtype, lost.op, spans)
        if lost.scale is not None:
            on = "" if self.step.scales_loss else "switch loss scaling on (policy fp16): "
            scaled = Candidate(
                f"a loss scale of {power(lost.scale)}",
                f"{on}{self.step.how_scaled(lost.scale)}",
                scale=lost.scale,
            )
            found = [scaled, *found]
        return fix.tried(self.step, stash, found, wanted)

    def _stagnation_fixes(self) -> list[Fix]:
        """float32 copies of the weights, tried: do they move?"""
        moved = stagnation.moves_in_float32(self.step)
        return [
            Fix(
                "float32 master weights",
                "keep the parameters in float32 and let autocast compute in 16 bits: "
                f"{self.step.how(PRESETS['bf16'])}",
                verified=moved,
                cost="4 more bytes for each parameter" if moved else "tried: they do not move then",
            )
        ]

    # -- common ------------------------------------------------------------------------------------

    def empty(self, stash: Stash) -> Diagnosis:
        """A diagnosis of a window that nobody has looked at yet."""
        return self._new(stash, stash.losses)

    def _new(self, stash: Stash, losses: Sequence[Tensor]) -> Diagnosis:
        return Diagnosis(
            status="clean",
            task=self._task,
            precision=self.step.policy.text,
            device=str(self.step.device),
            step=stash.step,
            loss=loss_of(list(losses)),
            loss_scale=float(stash.scale) if self.step.scales_loss else None,
            environment=environment(self.step.device),
        )

    def _watched(
        self, stash: Stash, *, backward: bool = True
    ) -> tuple[Trace, dict[str, dict[str, float]]]:
        """`watch`, and the exponents of what modules return."""
        with self._outputs() as histograms:
            trace = watch(self.step, stash, backward=backward)
        return trace, histograms

    @contextmanager
    def _outputs(self) -> Generator[dict[str, dict[str, float]]]:
        """Exponents of what each module returns, the first time in the context."""
        found: dict[str, dict[str, float]] = {}
        names = {id(m): n for model in self.step.models for n, m in model.named_modules() if n}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            name = names.get(id(module))
            if name is None or name in found or len(found) >= _MODULES:
                return
            if isinstance(output, Tensor) and output.is_floating_point():
                with _disable_current_modes():
                    found[name] = exponents(output)

        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            yield found
        finally:
            handle.remove()


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
    found.explanation = (
        "Replaying the step from its batch, random state and buffers did not fail in the same way. "
        "Something else takes part: nondeterministic kernels, batches changed in place, or state "
        "outside the model."
    )
    return found


def _scale_in_words(found: Diagnosis) -> str:
    return (
        f"Only the loss scale of {power(found.loss_scale or 1.0)} was too high: the gradients of "
        "this step are finite under a lower one. The scale settles by itself, at the price of the "
        "skipped step."
    )


def _phase_of(root: Root) -> Phase | Literal["data"]:
    return "data" if root.func is None and root.name == "batch" else root.place.phase


def _origin(root: Root, cause: Cause) -> Origin:
    """Where it began: the root, or what made its argument."""
    maker = cause.made_by or root
    if isinstance(maker, Root):
        return replace(origin_of(maker), inside=cause.inside)
    return at(maker.place, maker.name, maker.dtype)


def _beyond_fixes(fixes: Sequence[Fix], wanted: fix.Reference, step: Replayable) -> list[str]:
    """What to say where another precision is of no use, or no fix held."""
    if not wanted.float32:
        return ["float32 itself fails on this step: another precision alone does not mend it."]
    if step.policy.autocast and not any(each.verified for each in fixes):
        return [
            "No fix held by itself; ampwise tune looks for a set of modules to keep in float32."
        ]
    return []


def _poisoned(names: Sequence[str]) -> list[Finding]:
    if not names:
        return []
    return [
        Finding(
            "BAD_BUFFER",
            f"Forward leaves inf or NaN in {', '.join(names[:6])}. A loop that only skips the "
            "optimizer step keeps them, and evaluation breaks; ampwise.TrainStep puts the buffers "
            "back.",
        )
    ]


def _settled(step: Replayable, stash: Stash) -> Stash:
    """The same window under a loss scale that has settled."""
    scale = stash.scale.clone()
    while float(scale) > 1 and not step.replay(stash, scale=float(scale)).clean:
        scale /= 2
    return Stash(stash.step, scale, stash.micro_batches)


def _place_of(error: Exception, phase: Phase) -> Place:
    """The user's own innermost line of a traceback."""
    trace, found = error.__traceback__, NOWHERE
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_internal(code.co_filename):
            found = Place(phase, "", 0, code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _worst(run: ShadowRun) -> list[OpError]:
    """Operations by their own error, the worst first; each place once."""
    found: list[OpError] = []
    seen: set[tuple[str, str, int]] = set()
    for each in sorted(run.errors, key=lambda error: error.local_db):
        key = (each.name, each.place.module, each.place.line)
        if key in seen or each.local_db == float("inf"):
            continue
        seen.add(key)
        found.append(
            OpError(each.name, each.place.module, each.place.file, each.place.line,
                    each.place.phase, each.dtype, each.local_db, each.propagated_db,
                    each.bias)
        )  # fmt: skip
        if len(found) == _WORST:
            break
    return found
