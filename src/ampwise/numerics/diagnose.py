"""From a task, or a step that was skipped, to a `Diagnosis`.

run       train with the flight recorder on, until a step goes wrong or the budget ends
reproduce replay the window: the same loss, the same failure, or say so
benign    was only the loss scale too high? then training goes on
origin    replay under watch                                   (`trace`)
cause     experiments on the origin's inputs                   (`cause`)
silent    no NaN anywhere: the step against its float64 shadow (`silent`)
fixes     each tried on the failing step                       (`fix`)
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.bench.arm import Arm, Settings
from ampwise.data import to_device
from ampwise.errors import UsageError
from ampwise.numerics import compiled, fix
from ampwise.numerics.cause import explain
from ampwise.numerics.places import NOWHERE, Phase, Place, is_internal
from ampwise.numerics.result import Diagnosis, Finding, Fix, OpError
from ampwise.numerics.shadow import ShadowRun
from ampwise.numerics.silent import Lost, gradient_db, silent_faults
from ampwise.numerics.trace import Root, Trace, watch, watch_update
from ampwise.numerics.values import at, exponents, loss_of, origin_of
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Recorder, Stash, rehearsal, replay
from ampwise.step.train_step import TrainStep
from ampwise.tasks import Task
from ampwise.tasks.checks import endless
from ampwise.telemetry.environment import environment

STEPS = 50
BUDGET_S = 60.0
_LEAST_STEPS = 3
_WORST = 10
_MODULES = 48
_HALF_BYTES = 2
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


@dataclass(frozen=True)
class DiagnoseConfig:
    """What is asked for.

    Attributes
    ----------
    steps, budget_s
        When to stop looking for a step that goes wrong: whichever ends first, but not before three
        steps.
    """

    policy: Policy
    settings: Settings = field(default_factory=lambda: Settings(torch.device("cpu")))
    steps: int = STEPS
    budget_s: float = BUDGET_S


def diagnose(
    task: Task,
    precision: str | Policy = "fp16",
    *,
    device: str | torch.device = "cpu",
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Train a task in a precision until a step goes wrong, and find out why.

    Parameters
    ----------
    precision
        Preset or policy, used as asked.
    steps
        Steps to make when none goes wrong; the last is then examined for silent faults.

    Returns
    -------
    Diagnosis
        Status, origin, cause, fixes (each verified by replay, or said not to be), findings.

    Raises
    ------
    UsageError
        For a precision that is unknown; and whatever the task's own code raises in float32, too.
    """
    policy = precision if isinstance(precision, Policy) else Policy.parse(precision)
    settings = Settings(torch.device(device), seed)
    return run_diagnosis(task, DiagnoseConfig(policy, settings, steps), progress or Silent())


def run_diagnosis(task: Task, config: DiagnoseConfig, progress: Progress) -> Diagnosis:
    """`diagnose`, with everything configurable."""
    return explore(task, config, progress)[1]


def explore(task: Task, config: DiagnoseConfig, progress: Progress) -> tuple[Arm, Diagnosis, Stash]:
    """Train until a step goes wrong: the arm as it then is, the diagnosis, and the window."""
    if config.steps < 1:
        raise UsageError(f"steps: expected 1 or more, got {config.steps}")
    arm = Arm(task, config.policy, config.settings)
    recorder = arm.step.recorder = Recorder()
    examiner = Examiner(arm.step, task.name or "task", progress)
    deadline = time.monotonic() + config.budget_s
    batches = endless(task)
    found: Diagnosis | None = None
    while True:
        made = arm.step.steps
        late = time.monotonic() > deadline and made >= _LEAST_STEPS
        last = late or made == config.steps - 1
        weights = _weights(arm.step) if last else {}
        failure, window = _one_step(arm, examiner, batches)
        if failure is None:
            record = arm.step.history[-1]
            progress.step(record.step, config.steps, record.loss)
            if record.skipped or not math.isfinite(record.loss):
                failure = examiner.skipped()
        if failure is not None and failure.status != "benign":
            stash = recorder.open or recorder.closed
            assert stash is not None
            if failure.cause == "BAD_PARAMETER" and made:
                in_update(task, config, made, failure)
            return arm, failure, stash
        found = failure or found
        if last:
            break
    progress.stage("no step failed; comparing the last one with float64")
    stash = rehearsal(arm.step, arm.loss, window)
    quiet = examiner.quiet(stash, _stagnant(arm.step, weights))
    return arm, found if quiet.status == "clean" and found is not None else quiet, stash


def in_update(task: Task, config: DiagnoseConfig, steps: int, found: Diagnosis) -> None:
    """A parameter went bad in an earlier update: train again up to the last, and watch it.

    Changes phase, origin and explanation of `found` where the update is the culprit.
    """
    arm = Arm(task, config.policy, config.settings)
    batches = endless(task)
    while arm.step.steps < steps - 1:
        arm.run(next(batches))
    while arm.step.position < config.settings.accumulate:
        batch = to_device(next(batches), arm.step.device)
        arm.step._micro_batch(arm.loss, batch, None)
    root, name = watch_update(arm.step)
    if root is None:
        return
    found.phase, found.origin, found.step = "optimizer", origin_of(root), steps
    found.explanation = (
        f"{found.explanation} The update of step {steps} made it so: {root.name} turned finite "
        f"gradients and state into values of {name} that are not."
    )


def _one_step(
    arm: Arm, examiner: Examiner, batches: Iterator[Any]
) -> tuple[Diagnosis | None, list[Any]]:
    """Micro-batches until a step is made or skipped: what they raised, and the batches."""
    window: list[Any] = []
    while True:
        batch = next(batches)
        window.append(to_device(batch, arm.step.device))
        try:
            arm.run(batch)
        except Exception as error:
            found = examiner.raised(error)
            if found is None:
                raise
            return found, window
        if arm.step.boundary:
            return None, window


@dataclass(frozen=True)
class Stagnant:
    """Weights that an update did not move.

    Attributes
    ----------
    share
        Of all elements with a non-zero gradient, those that stayed as they were, by parameter.
    """

    share: dict[str, float]
    dtype: str


class Examiner:
    """Examines single windows of a `TrainStep`."""

    def __init__(self, step: TrainStep, task: str, progress: Progress | None = None) -> None:
        self.step = step
        self._task = task
        self._progress = progress or Silent()
        self._step_s = 0.0  # about how long a replay takes

    # -- a step that was skipped -------------------------------------------------------------------

    def skipped(self) -> Diagnosis:
        """The window that was just skipped."""
        assert self.step.recorder is not None
        stash = self.step.recorder.closed
        assert stash is not None
        return self.failure(stash)

    def settling(self, stash: Stash) -> bool:
        """Whether only the loss scale of a skipped window was too high."""
        losses = stash.losses or replay(self.step, stash).losses
        return self._only_the_scale(stash, losses)

    def failure(self, stash: Stash) -> Diagnosis:
        """A window with a non-finite loss or gradient."""
        step = self.step
        self._progress.stage(f"step {stash.step} is not finite; replaying it")
        # Watched, a compiled model runs eagerly, and perhaps ever after: see first if it fails.
        eagerly = compiled.is_compiled(step)
        before = replay(step, stash) if eagerly else None
        trace, histograms = self._watched(stash)
        plain = before or trace.replayed
        found = self._new(stash, plain.losses)
        found.histograms = histograms
        if not _same(stash.losses, plain.losses) or plain.clean or plain.error is not None:
            return _not_reproduced(found, trace)
        if self._only_the_scale(stash, plain.losses):
            return self._benign(found, stash, trace)
        if step.loss_scale.enabled and found.loss is not None:
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
        found.status = "fault"
        found.phase = "data" if root.func is None and root.name == "batch" else root.place.phase
        found.origin = origin_of(root)
        found.cause, found.explanation = cause.cause, cause.explanation
        found.path, found.target = trace.path, trace.target
        found.findings += _poisoned(plain.poisoned)
        self._progress.found(found)
        self._progress.stage("trying fixes on the step")
        wanted = fix.reference(step, stash)
        mends = fix.candidates(step, stash, cause.cause, root.place)
        found.fixes = fix.tried(step, stash, mends, wanted, self._step_s)
        return found

    def _only_the_scale(self, stash: Stash, losses: Sequence[Tensor]) -> bool:
        """Whether the same window is clean under a lower loss scale, of at least 1."""
        if not self.step.loss_scale.enabled or loss_of(list(losses)) is None:
            return False
        scale = float(stash.scale)
        while scale > 1.0:
            scale = max(1.0, scale / 16)
            if replay(self.step, stash, scale=scale).clean:
                return True
        return False

    def _benign(self, found: Diagnosis, stash: Stash, trace: Trace) -> Diagnosis:
        found.status, found.cause = "benign", "SCALE_TOO_HIGH"
        found.target = trace.target
        if trace.origin is not None:
            found.phase, found.origin = trace.origin.place.phase, origin_of(trace.origin)
            found.path = trace.path
        place = NOWHERE if trace.origin is None else trace.origin.place
        found.fixes = fix.tried(
            self.step,
            stash,
            fix.candidates(self.step, stash, "SCALE_TOO_HIGH", place),
            None,
            self._step_s,
        )
        found.explanation = (
            f"Only the loss scale of {found.loss_scale:g} was too high: the gradients of this step "
            f"are finite under a lower one. The scale settles by itself, at the price of the "
            "skipped step."
        )
        return found

    # -- a step that raised ------------------------------------------------------------------------

    def raised(self, error: Exception) -> Diagnosis | None:
        """A window that raised; None when it raises in float32 as well (a fault of the task)."""
        recorder = self.step.recorder
        stash = None if recorder is None else recorder.open
        if stash is None or not self.step.policy.autocast:
            return None
        if replay(self.step, stash, policy=PRESETS["fp32"], scale=1.0).error is not None:
            return None
        trace = watch(self.step, stash)
        found = self._new(stash, trace.replayed.losses)
        root = trace.failed
        place = _place_of(error, "forward") if root is None else root.place
        found.status, found.phase = "fault", place.phase
        found.origin = at(place, type(error).__name__) if root is None else origin_of(root)
        constant = None if root is None else _constant(root)
        message = " ".join(str(error).split())[:200]
        if constant is not None:
            found.cause = "MASK_CONSTANT"
            found.explanation = (
                f"The constant {constant:g} does not fit into {self.step.policy.compute_dtype}, "
                f"and {root.name if root else 'the call'} raises: {message}. In float32 it is "
                "finite."
            )
        else:
            found.cause = "DTYPE_ERROR"
            found.explanation = (
                f"Under {self.step.policy.text} this raises {type(error).__name__}: {message}. In "
                "float32 the same step runs."
            )
        self._progress.found(found)
        wanted = fix.reference(self.step, stash)
        found.fixes = fix.tried(
            self.step,
            stash,
            fix.candidates(self.step, stash, found.cause, place),
            wanted,
            self._step_s,
        )
        return found

    # -- a step without NaN ------------------------------------------------------------------------

    def quiet(self, stash: Stash, stagnant: Stagnant | None = None) -> Diagnosis:
        """A window that runs without NaN: is it right?"""
        trace, histograms = self._watched(stash)
        found = self._new(stash, trace.replayed.losses)
        found.step, found.histograms = self.step.steps, histograms
        if trace.target and self.step.loss_scale.enabled:
            stash = _settled(self.step, stash)
            trace = watch(self.step, stash)
        if trace.target:
            return self.failure(stash)
        lost, run = silent_faults(self.step, stash, trace)
        found.worst_ops = _worst(run)
        found.notes.append(f"SQNR of the gradient against float64: {gradient_db(run):.0f} dB")
        wanted = fix.reference(self.step, stash)
        severe = [each for each in lost if each.severe]
        if stagnant is not None and stagnant.share:
            found.status, found.phase, found.cause = "fault", "optimizer", "STAGNATION"
            found.explanation, found.origin = _stagnation(stagnant, self.step)
            self._progress.found(found)
            found.fixes = self._stagnation_fixes()
        elif severe:
            self._tell(found, severe.pop(0), stash, wanted)
        found.findings += [self._finding(each, stash, wanted) for each in severe]
        found.findings += _poisoned(trace.replayed.poisoned)
        return found

    def _tell(self, found: Diagnosis, lost: Lost, stash: Stash, wanted: fix.Reference) -> None:
        """Make the gravest silent fault the diagnosis."""
        cause, explanation, origin = self._explained(lost, stash)
        found.status, found.cause, found.explanation = "fault", cause, explanation
        found.phase, found.origin = lost.place.phase, origin
        self._progress.found(found)
        self._progress.stage("trying fixes on the step")
        found.fixes = self._silent_fixes(lost, cause, stash, wanted)

    def _finding(self, lost: Lost, stash: Stash, wanted: fix.Reference) -> Finding:
        cause, explanation, origin = self._explained(lost, stash)
        fixes = self._silent_fixes(lost, cause, stash, wanted)
        return Finding(cause, explanation, lost.place.phase, origin, fixes)

    def _explained(self, lost: Lost, stash: Stash) -> tuple[str, str, Any]:
        if lost.root is None:
            return lost.cause, lost.explanation, at(lost.place, lost.op, lost.dtype)
        cause = explain(self.step, stash, lost.root)
        return cause.cause, f"{cause.explanation} {lost.explanation}", origin_of(lost.root)

    def _silent_fixes(
        self, lost: Lost, cause: str, stash: Stash, wanted: fix.Reference
    ) -> list[Fix]:
        found = fix.candidates(self.step, stash, cause, lost.place)
        if lost.scale is not None:
            scaled = fix.Candidate(
                f"a loss scale of {lost.scale:g}",
                "switch loss scaling on (policy fp16), or "
                f"TrainStep(loss_scale=LossScale(init_scale={lost.scale:g}))",
                scale=lost.scale,
            )
            found = [scaled, *found]
        return fix.tried(self.step, stash, found, wanted, self._step_s)

    def _stagnation_fixes(self) -> list[Fix]:
        """float32 copies of the weights, tried: do they move?"""
        moved = _moves_in_float32(self.step)
        return [
            Fix(
                "float32 master weights",
                "keep the parameters in float32 and let autocast compute in 16 bits (policy bf16), "
                "or --precision bf16-master on a float32 model",
                verified=moved,
                cost="4 more bytes for each parameter" if moved else "tried: they do not move then",
            )
        ]

    # -- common ------------------------------------------------------------------------------------

    def _new(self, stash: Stash, losses: Sequence[Tensor]) -> Diagnosis:
        return Diagnosis(
            status="clean",
            task=self._task,
            precision=self.step.policy.text,
            device=str(self.step.device),
            step=stash.step,
            loss=loss_of(list(losses)),
            loss_scale=float(stash.scale) if self.step.loss_scale.enabled else None,
            environment=environment(self.step.device),
        )

    def _watched(self, stash: Stash) -> tuple[Trace, dict[str, dict[str, float]]]:
        """`watch`, and the exponents of what modules return."""
        start = time.perf_counter()
        with self._outputs() as histograms:
            trace = watch(self.step, stash)
        self._step_s = time.perf_counter() - start
        return trace, histograms

    @contextmanager
    def _outputs(self) -> Generator[dict[str, dict[str, float]]]:
        """Exponents of what each module returns, the first time in the context."""
        found: dict[str, dict[str, float]] = {}
        names = {id(m): n for model in self.step._models for n, m in model.named_modules() if n}

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
    """Bit for bit, NaN equal to NaN; a window that was not recorded has nothing to compare."""
    return all(
        torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))
        for a, b in zip(recorded, replayed, strict=False)
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


def _settled(step: TrainStep, stash: Stash) -> Stash:
    """The same window under a loss scale that has settled."""
    scale = stash.scale.clone()
    while float(scale) > 1 and not replay(step, stash, scale=float(scale)).clean:
        scale /= 2
    return Stash(stash.step, scale, stash.micro_batches)


def _weights(step: TrainStep) -> dict[str, Tensor]:
    return {name: step._master.of(each).detach().clone() for name, each in step._names.items()}


def _stagnant(step: TrainStep, before: dict[str, Tensor]) -> Stagnant | None:
    """16-bit weights most of which did not move, though the window's step was made."""
    record = step.history[-1]
    if record.skipped or not record.lr > 0 or not record.grad_norm > 0:
        return None
    stash = None if step.recorder is None else step.recorder.closed
    if stash is None:
        return None
    touched = replay(step, stash).gradients
    share: dict[str, float] = {}
    dtype = ""
    for name, old in before.items():
        now = step._master.of(step._names[name]).detach()
        gradient = touched.get(name)
        if gradient is None or gradient.is_sparse or now.element_size() > _HALF_BYTES:
            continue
        pushed = gradient != 0
        if not bool(pushed.any()):
            continue
        still = float(((now == old) & pushed).sum()) / float(pushed.sum())
        if still > 0.5:
            share[name], dtype = still, str(now.dtype).removeprefix("torch.")
    return Stagnant(share, dtype) if share else None


def _stagnation(stagnant: Stagnant, step: TrainStep) -> tuple[str, Any]:
    named = ", ".join(f"{name} {share:.0%}" for name, share in list(stagnant.share.items())[:6])
    rate = float(step._optimizers[0].param_groups[0]["lr"])
    text = (
        f"Updates are lost: of the weights that have a gradient, most did not move in this step "
        f"({named}). At a learning rate of {rate:g} the update is below half an ULP of a "
        f"{stagnant.dtype} weight and rounds to nothing."
    )
    name = next(iter(stagnant.share))
    place = Place("forward", name.rpartition(".")[0], 0, "", 0)
    return text, at(place, "optimizer.step", stagnant.dtype)


def _moves_in_float32(step: TrainStep) -> bool:
    """Whether the same update, made on float32 copies, moves most weights."""
    recorder = step.recorder
    assert recorder is not None
    assert recorder.closed is not None
    gradients = replay(step, recorder.closed).gradients
    optimizer = step._optimizers[0]
    held = {id(step._master.of(each)): name for name, each in step._names.items()}
    moved = total = 0
    groups: list[dict[str, Any]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        own: list[Tensor] = []
        for parameter in group["params"]:
            gradient = gradients.get(held.get(id(parameter), ""))
            if gradient is None or gradient.is_sparse:
                continue
            copy = nn.Parameter(parameter.detach().float().clone())
            copy.grad = gradient.float() / float(recorder.closed.scale)
            own.append(copy)
            copies.append((copy, copy.detach().clone()))
        if own:
            groups.append({**group, "params": own})
    if not groups:
        return False
    twin = type(optimizer).__new__(type(optimizer))
    twin.__setstate__({"defaults": optimizer.defaults, "state": {}, "param_groups": []})
    torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
    twin.step()
    for copy, old in copies:
        pushed = copy.grad != 0
        moved += int(((copy != old) & pushed).sum())
        total += int(pushed.sum())
    return total > 0 and moved > 0.5 * total


def _constant(root: Root) -> float | None:
    scalars = [each for each in (*root.args, *root.kwargs.values()) if isinstance(each, float)]
    return next((each for each in scalars if abs(each) > 65504), None)


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
