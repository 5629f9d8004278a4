"""From a task to a `Diagnosis`: train with the flight recorder on, until a step goes wrong.

If none does, some on the way and the last are compared with float64. What a window shows is
`examine`'s to say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ampwise.bench.arm import Arm, Settings
from ampwise.data import to_device
from ampwise.distributed.host_group import beside, everyone
from ampwise.distributed.launch import is_lost
from ampwise.distributed.layout import is_up
from ampwise.distributed.wrap import spread
from ampwise.errors import UsageError
from ampwise.numerics.across_ranks import all_raised, examined, first_at_fault, talks
from ampwise.numerics.examine import Examiner
from ampwise.numerics.explain.silent import is_sound
from ampwise.numerics.observe import stagnation
from ampwise.numerics.observe.made import note_originals
from ampwise.numerics.observe.narrow import casts_of_float32, makers
from ampwise.numerics.observe.reference import Reference
from ampwise.numerics.observe.values import loss_of
from ampwise.numerics.progress import Progress, Silent
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.result import Diagnosis
from ampwise.numerics.updates.behind import ADVICE, left_behind, wrong_updates
from ampwise.numerics.updates.of_task import Trained, failing_update, in_update
from ampwise.numerics.updates.update import last_update
from ampwise.policy import Policy
from ampwise.step.recorder import NonFiniteLossError, Recorder, Stash, UntilBad
from ampwise.step.replay import Replay, finite_buffers, poisoned
from ampwise.tasks import Task
from ampwise.tasks.checks import endless
from ampwise.telemetry.ring import StepRecord
from ampwise.training.share import DataRandom, Turn, turns, whole_turns
from ampwise_lint.base.words import joined

STEPS = 50
BUDGET_S = 60.0
_LEAST_STEPS = 3
_ON_THE_WAY = (1 / 4, 1 / 2, 3 / 4)
_LOOKED_S = 2.0
"""Where steps before the last one are compared, and seconds after which no more are."""
_WRONG = 2
"""How many of them have to be wrong before one is a fault."""


@dataclass(frozen=True)
class DiagnoseConfig:
    """What is asked for.

    Attributes
    ----------
    steps, budget_s
        When to stop looking for a step that goes wrong: whichever ends first, but not before three
        steps.
    source
        How another process loads the task; with it, patches of its source are tried.
    """

    policy: Policy
    settings: Settings = field(default_factory=lambda: Settings(torch.device("cpu")))
    steps: int = STEPS
    budget_s: float = BUDGET_S
    source: TaskSource | None = None

    def trained(self, task: Task, steps: int) -> Trained:
        """A task that can be trained again up to a step, as it is here."""
        return Trained(task, self.policy, self.settings, steps)


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
        Steps to make when none goes wrong; at a quarter, halfway, at three quarters and at the end
        one is examined for silent faults.

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
    arm, found, stash, wanted = explore(task, config, progress)
    updates = _wrong_updates(task, config, arm, found, progress)
    if config.source is not None:
        from ampwise.numerics.remedy.patch import add_patches  # loads libcst

        failing = Failing(config.source, arm, config.settings, stash, wanted=wanted)
        if updates:
            failing = replace(failing, updates=updates)
        elif found.cause == "STAGNATION":
            failing = replace(failing, updates=arm.step.steps)
        elif found.phase == "optimizer" and task.loss is not None:
            trained = config.trained(task, found.step)
            failing = failing_update(trained, config.source)
        if found.phase == "optimizer" and arm.step.ranks == 1:
            made = makers(task, config.settings)
            failing = replace(failing, made={} if updates else made, casts=casts_of_float32(made))
        add_patches(found, failing, progress)
        if any(each.verified for each in found.fixes):
            found.fixes = [each for each in found.fixes if each is not ADVICE]
    return found


def _wrong_updates(
    task: Task, config: DiagnoseConfig, arm: Arm, found: Diagnosis, progress: Progress
) -> int:
    """Say of a run whether its updates were what they should be, unless one is at fault already.

    A step that fails may only show that those before it led parameters astray.

    Returns
    -------
    int
        How many are at fault: all that were made, or 0.
    """
    sound = found.status in ("clean", "benign")
    steps = arm.step.steps if sound else found.step - 1
    if not steps or found.phase == "optimizer" or arm.step.ranks > 1 or config.policy.pure:
        return 0
    trained = config.trained(task, steps)
    wrong = wrong_updates(trained, arm, found, progress, too_far=not sound)
    return steps if wrong else 0


class Explored(NamedTuple):
    """Training as far as a step that went wrong, or was the last.

    Attributes
    ----------
    wanted
        What that step should have given; None where nobody has asked.
    """

    arm: Arm
    found: Diagnosis
    stash: Stash
    wanted: Reference | None


def explore(task: Task, config: DiagnoseConfig, progress: Progress) -> Explored:
    """Train until a step goes wrong, and examine it."""
    if config.steps < 1:
        raise UsageError(f"steps: expected 1 or more, got {config.steps}")
    arm = _arm(task, config)
    # Ranks go through backward together, so none of them ends a window by itself.
    arm.step.recorder = Recorder() if is_up() else UntilBad()
    step = Replay(arm.step)
    examiner = _examiner(step, task, progress)
    deadline = time.monotonic() + config.budget_s
    mine = _turns(task, whole=arm.iteration.makes_updates)
    looks = _Looks(config.steps)
    buffers = _Buffers(step, task, config, progress)
    found: Diagnosis | None = None
    begun: StepRecord | None = None
    while True:
        made = arm.step.steps
        over = time.monotonic() > deadline
        late = everyone().first(lambda over=over: over) and made >= _LEAST_STEPS
        last = late or made == config.steps - 1
        weights = stagnation.weights_of(step) if last else None
        failure, window = _one_step(arm, examiner, mine)
        if failure is None:
            record = arm.step.history[-1]
            begun = begun or _begun(step, record)
            progress.step(record.step, config.steps, record.loss)
            if record.skipped or not math.isfinite(record.loss):
                assert step.closed is not None
                failure = examined(examiner, step.closed, examiner.skipped)
        if failure is not None and failure.status != "benign":
            stash = step.open or step.closed
            assert stash is not None
            _in_update(task, config, arm, last_update(stash, made), failure)
            return Explored(arm, failure, stash, examiner.wanted)
        found = failure or found
        if (spoilt := buffers.spoilt(made + 1)) is not None:
            return spoilt
        if not last and (failure is not None or not looks.is_due(made)):
            continue
        progress.stage(f"no step failed; comparing step {arm.step.steps} with float64")
        looked = time.monotonic()
        trained = config.trained(task, arm.step.steps)
        quiet, stash = _quiet(trained, arm, examiner, window, begun, weights, looks)
        looked = time.monotonic() - looked
        looks.made(made, looked)
        deadline += looked  # training has its time yet
        if not last and quiet.status != "fault":
            continue
        _in_update(task, config, arm, arm.step.steps, quiet)
        if quiet.status != "clean" or found is None:
            found = quiet
        else:  # what is said of this step, beside a skipped one before it
            found.notes += [f"Step {quiet.step}: {each}" for each in quiet.notes]
        return Explored(arm, found, stash, examiner.wanted)


class _Looks:
    """When steps before the last one are compared; all ranks decide alike.

    A single step that is wrong may come and go: it counts from the second one on.
    """

    def __init__(self, steps: int) -> None:
        self._at = [int(share * steps) for share in _ON_THE_WAY if steps > _LEAST_STEPS]
        self._spent = 0.0
        self._compared: list[int] = []
        self._wrong: list[int] = []

    def is_due(self, steps: int) -> bool:
        """Whether the step that was made after these is to be compared."""
        if not self._at or steps < self._at[0]:
            return False
        return everyone().first(lambda: self._spent < _LOOKED_S)

    def is_sound(self, step: Replay, stash: Stash) -> bool:
        """Whether nothing is to be said of a step."""
        if is_sound(step, stash):
            self._compared.append(step.steps)
            return True
        self._note(step.steps)
        return len(self._wrong) < _WRONG

    def _note(self, number: int) -> None:
        """A step was compared, and is wrong."""
        if number not in self._compared:
            self._compared.append(number)
            self._wrong.append(number)

    def told(self, found: Diagnosis) -> Diagnosis:
        """A diagnosis of a step, with which ones were compared, where it is at fault."""
        if found.status == "fault" and found.cause != "STAGNATION":
            self._note(found.step)
            several = len(self._compared) > 1
            compared = f"step{'s' if several else ''} {joined(map(str, self._compared))}"
            words = f"Compared with float64 {'were' if several else 'was'} {compared}"
            if self._wrong != self._compared:
                words = f"{words}, wrong {joined(map(str, self._wrong))}"
            found.notes.append(f"{words}; the others were not looked at.")
        return found

    def made(self, steps: int, seconds: float) -> None:
        """It was, and took so long."""
        self._at = [each for each in self._at if each > steps]
        self._spent += seconds


def _in_update(task: Task, config: DiagnoseConfig, arm: Arm, steps: int, found: Diagnosis) -> None:
    """Say of a parameter that is not finite which update made it so, if one did."""
    if found.cause == "BAD_PARAMETER" and steps and arm.step.ranks == 1:
        in_update(config.trained(task, steps), found)


def _examiner(step: Replay, task: Task, progress: Progress) -> Examiner:
    return Examiner(step, task.name or "task", progress)


def _begun(step: Replay, record: StepRecord) -> StepRecord | None:
    """A step with the loss that it trains on: what an iteration reports need not be that."""
    if record.skipped:
        return None
    assert step.closed is not None
    trained = loss_of(step.closed.losses)
    return replace(record, loss=record.loss if trained is None else trained)


class _Buffers:
    """Looks for a step whose forward leaves a buffer that is not finite, and should be.

    The step itself may be sound, and be made: it is a later one that reads the buffer. With several
    ranks nobody looks, as one of them cannot train again by itself.
    """

    def __init__(
        self, step: Replay, task: Task, config: DiagnoseConfig, progress: Progress
    ) -> None:
        self._step, self._task, self._config, self._progress = step, task, config, progress
        self._good = self._finite()

    def _finite(self) -> list[set[str]]:
        return [] if is_up() else finite_buffers(self._step.models)

    def spoilt(self, number: int) -> Explored | None:
        """What is to be said of the step that was just made."""
        before, self._good = self._good, self._finite()
        if before == self._good or not poisoned(self._step.models, before):
            return None
        self._progress.stage(f"step {number} leaves a buffer that is not finite; training again")
        arm, stash = self._config.trained(self._task, number).rehearsal()
        note_originals(self._task, arm, self._config.settings)
        examiner = _examiner(Replay(arm.step), self._task, self._progress)
        found = examiner.spoils(stash)
        return None if found is None else Explored(arm, found, stash, examiner.wanted)


def _quiet(
    trained: Trained, arm: Arm, examiner: Examiner, window: list[Any], begun: StepRecord | None,
    before: dict[str, Tensor] | None, looks: _Looks,
) -> tuple[Diagnosis, Stash]:  # fmt: skip
    """The next step on a window beside float64; by the first process alone, which replays it often.

    Parameters
    ----------
    before
        Weights before the step that was just made: it is asked whether they moved. None for a step
        of which it is enough to know that it is sound.
    """
    step = Replay(arm.step)
    stash = step.rehearsal(arm.iteration.again, window)

    def alone() -> Diagnosis:
        if before is None:
            sound = looks.is_sound(step, stash)
            return examiner.empty(stash) if sound else looks.told(examiner.quiet(stash, begun))
        still = stagnation.stagnant(step, before, arm.step.history[-1])
        if still is not None and step.ranks == 1:
            still = left_behind(trained, arm, still)
        return looks.told(examiner.quiet(stash, begun, still))

    if step.ranks == 1 or not talks(step, stash):
        return everyone().first(alone), stash
    assert step.closed is not None
    found = examiner.empty(step.closed)
    found.notes.append(
        f"Forward or loss talk to other ranks: step {step.steps} was not compared with float64."
    )
    return found, stash


def _arm(task: Task, config: DiagnoseConfig) -> Arm:
    if is_up():
        return _Copies(task, config.policy, config.settings)
    arm = Arm(task, config.policy, config.settings)
    note_originals(task, arm, config.settings)
    return arm


class _Copies(Arm):
    """An arm whose model each rank has a copy of, so that each can replay its part by itself."""

    def __init__(self, task: Task, policy: Policy, settings: Settings) -> None:
        super().__init__(task, policy, settings, lambda given: spread(given, "ddp", policy))
        beside(self.step.group)  # while all ranks are here


def _turns(task: Task, *, whole: bool) -> Iterator[Turn]:
    """Batches of epoch after epoch; with several processes, those of this one."""
    if not is_up():
        yield from (Turn(batch, counts=True, last=False) for batch in endless(task))
    source = DataRandom()
    while True:
        dealt = turns(task.batches, dist.get_rank(), dist.get_world_size(), source)
        yield from whole_turns(dealt, begins=True) if whole else dealt


def _one_step(
    arm: Arm, examiner: Examiner, mine: Iterator[Turn]
) -> tuple[Diagnosis | None, list[Any]]:
    """Micro-batches until a step is made or skipped: what they raised, and the batches."""
    window: list[Any] = []
    while True:
        turn = next(mine)
        window.append(to_device(turn.batch, arm.step.device))
        try:
            arm.iteration(arm.step, window[-1], counts=turn.counts)
        except NonFiniteLossError:
            return examiner.failed(), window
        except Exception as error:
            if is_lost(error):
                raise
            alike, found = all_raised(examiner.step), examiner.raised(error)
            if alike:
                found = first_at_fault(found, examiner.step.group)
            if found is None:
                raise
            if not alike:  # the others learn of it by this rank's end, and of nothing else
                error.add_note(found.explanation)
                raise
            return found, window
        if arm.step.boundary:
            return None, window
