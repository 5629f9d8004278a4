"""The update of a task that made a parameter inf or NaN: the task is trained again as far as that.

An iteration makes several updates. It is run as far as each, until one leaves a parameter that is
not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.bench.arm import Arm, Settings
from ampwise.data import to_device
from ampwise.errors import kind_and_words
from ampwise.numerics.observe.narrow import in_words, makers
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import Shadow
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.numerics.updates import update
from ampwise.places import placing
from ampwise.policy import Policy
from ampwise.step.modules import in_form
from ampwise.step.recorder import Stash, finite
from ampwise.step.replay import Replay
from ampwise.tasks import Task
from ampwise.tasks.checks import endless
from ampwise_lint.base.words import joined

_NO_UPDATE = "No update made it so: made again, all of them leave finite parameters."


@dataclass(frozen=True)
class Trained:
    """A task that is trained again, each time from its beginning.

    Attributes
    ----------
    steps
        Number of the step whose update is looked at.
    """

    task: Task
    policy: Policy
    settings: Settings
    steps: int

    def arm(self) -> tuple[Arm, Iterator[Any]]:
        """The arm as that step begins, and the batches from there on."""
        arm = Arm(self.task, self.policy, self.settings)
        batches = endless(self.task)
        while arm.step.steps < self.steps - 1:
            arm.run(next(batches))
        return arm, (to_device(each, arm.step.device) for each in batches)

    def rehearsal(self) -> tuple[Arm, Stash]:
        """The same, and that step as a window that has not run."""
        arm, batches = self.arm()
        window = [next(batches) for _ in range(self.settings.accumulate)]
        return arm, Replay(arm.step).rehearsal(arm.iteration.again, window)

    def before(self, number: int) -> update.Update:
        """The update, still to be made; of an iteration, one of several."""
        arm, batches = self.arm()
        update.one_by_one(_OfWindow(arm).groups)
        if arm.iteration.makes_updates:
            return _OfIteration(arm, next(batches), number)
        while arm.step.position < self.settings.accumulate:
            arm.iteration.again(arm.step, next(batches))
        return _OfWindow(arm)


def failing_update(trained: Trained, source: TaskSource) -> Failing:
    """The step whose update failed, before it is made, and what float64 makes of it."""
    arm, stash = trained.rehearsal()
    return Failing(source, arm, trained.settings, stash, _ideal(trained.before(1)))


def in_update(trained: Trained, found: Diagnosis) -> None:
    """Say of a parameter that is not finite which operation of which update made it so.

    Changes `found` where an update of that step is the culprit.
    """
    number, which = 1, f"The update of step {trained.steps}"
    if trained.task.loss is None:
        first = _first_bad(trained)
        if first is None:
            found.notes.append(_NO_UPDATE)
            return
        number, whose = first
        which = f"Update {number} of iteration {trained.steps}, that of {whose},"
    lost = update.lost_in(trained.before(number))
    if lost is None:
        found.notes.append(_NO_UPDATE)
        return
    update.explain(found, partial(trained.before, number), *lost)
    found.step = trained.steps
    found.explanation += f" {which} made it so."
    _narrow_parameter(trained, found, lost)
    found.fixes = _fixes(trained, number, lost[0])


def _narrow_parameter(trained: Trained, found: Diagnosis, lost: tuple[Root, str]) -> None:
    """Say of a parameter that an update lost in 16 bits where it is made so.

    That is the origin, unless the update is the user's own, and has a line.
    """
    root, name = lost
    made = makers(trained.task, trained.settings).get(name) if update.is_narrow(root) else None
    if made is None:
        return
    found.explanation += f" {name} is made in {made.dtype} on {in_words(made.place)}."
    assert found.origin is not None
    if not found.origin.line:
        at = made.place
        found.origin = replace(
            found.origin, file=at.file, line=at.line, source=at.source, library=at.library
        )


class _OfWindow:
    """The update of a window whose backward is done."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._replay = Replay(arm.step)

    @property
    def models(self) -> Sequence[nn.Module]:
        """The task's."""
        return self._replay.models

    @property
    def named(self) -> Mapping[str, Tensor]:
        """All that they and the optimizers hold."""
        return self._replay.named_tensors()

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """Of all optimizers."""
        return [each for optimizer in self._replay.optimizers for each in optimizer.param_groups]

    def make(self, around: AbstractContextManager[Any] = nullcontext()) -> None:  # noqa: B008
        """Make it."""
        with around:
            self._arm.step.update()


class _OfIteration(_OfWindow):
    """An update in an iteration, by its number from 1."""

    def __init__(self, arm: Arm, batch: Any, number: int) -> None:
        super().__init__(arm)
        self._batch, self._number = batch, number

    def make(self, around: AbstractContextManager[Any] = nullcontext()) -> None:  # noqa: B008
        """Run the iteration up to it, and make it."""
        count = 0

        def update(real: Callable[[], None], _: object) -> bool:
            nonlocal count
            count += 1
            last = count == self._number
            with around if last else nullcontext():
                real()
            return last

        each_update(self._arm, self._batch, update)


def each_update(
    arm: Arm, batch: Any, update: Callable[[Callable[[], None], Sequence[Optimizer]], bool]
) -> None:
    """Run an iteration whose updates are made by a function, until that says that it is enough."""
    step = arm.step
    real = step.update

    def instead(optimizers: Sequence[Optimizer] | None = None, **options: Any) -> None:
        if update(partial(real, optimizers, **options), optimizers or step.optimizers):
            raise _EnoughError

    vars(step)["update"] = instead  # in place of the method, which the iteration calls
    with suppress(_EnoughError):
        arm.iteration.again(step, batch)


class _EnoughError(Exception):
    """Nothing that comes after an update is wanted."""


def _first_bad(trained: Trained) -> tuple[int, str] | None:
    """Which update of an iteration first leaves a parameter that is not finite, and whose it is."""
    arm, batches = trained.arm()
    held = Replay(arm.step).named_tensors().values()
    count, bad = 0, None

    def update(real: Callable[[], None], optimizers: Sequence[Optimizer]) -> bool:
        nonlocal count, bad
        real()
        count += 1
        if not all(map(finite, held)):
            bad = count, _names(arm.step.optimizer, optimizers)
        return bad is not None

    each_update(arm, next(batches), update)
    return bad


def _names(given: Any, some: Sequence[Optimizer]) -> str:
    """Optimizers by the keys under which a task gives them; else by their classes."""
    pairs = given.items() if isinstance(given, Mapping) else ((type(e).__name__, e) for e in some)
    return joined(str(name) for name, each in pairs if any(each is one for one in some))


def _fixes(trained: Trained, number: int, root: Root) -> list[Fix]:
    """A larger eps, and float32 parameters: each tried by making the update."""
    if not update.is_narrow(root):
        return [update.restored()]
    larger = _with_larger_eps(trained, number, root.outputs[0].dtype)
    return sorted([_in_float32(trained, number), *larger], key=lambda fix: not fix.verified)


def _in_float32(trained: Trained, number: int) -> Fix:
    """The update of float32 parameters, tried."""
    task = trained.task
    whole = replace(task, model=lambda: in_form(task.model(), nn.Module.float))
    cost = "2 more bytes for each number that it keeps"
    try:
        made = replace(trained, task=whole).before(number)
        made.make()
        held = all(map(finite, made.named.values()))
        why_not = "" if held else "tried: still not finite"
    except Exception as error:  # noqa: BLE001 - a task may cast by hand
        why_not = f"tried: {kind_and_words(error)}"
    return Fix(*update.IN_FLOAT32, verified=not why_not, cost=why_not or cost)


def _with_larger_eps(trained: Trained, number: int, dtype: torch.dtype) -> list[Fix]:
    """The same update with an eps that the format has, beside the one that float64 makes.

    Nothing where its optimizer has no eps.
    """
    made = trained.before(number)
    if not any("eps" in each for each in made.groups):
        return []
    eps, what, how = update.larger_eps(dtype)
    old: list[Tensor] = []
    made.make(_changed_to(eps, made, old))
    held = all(map(finite, made.named.values()))
    ideal = _ideal(trained.before(number))
    cosine = update.alike(_less(_doubles(made), old), _less(list(ideal.values()), old))
    wrong = f"its update is off (cosine {cosine:.2f})" if held else "still not finite"
    verified = held and cosine >= update.LEAST_ALIKE
    return [Fix(what, how, verified=verified, cost="nothing" if verified else f"tried: {wrong}")]


@contextmanager
def _changed_to(eps: float, made: update.Update, old: list[Tensor]) -> Generator[None]:
    """Context of an update that has this eps, and before which tensors were these."""
    old += _doubles(made)
    for each in made.groups:
        each["eps"] = eps
    yield


def _ideal(made: update.Update) -> dict[str, Tensor]:
    """What float64 makes of the tensors, by name."""
    with placing(made.models) as places:
        mode = Shadow(places, errors=False, at=None)
        made.make(mode)
    shadows = {name: (mode.of(each.detach()), each) for name, each in made.named.items()}
    return {
        name: each.detach().double() if ideal is None else ideal
        for name, (ideal, each) in shadows.items()
    }


def _doubles(made: update.Update) -> list[Tensor]:
    return [each.detach().double().clone() for each in made.named.values()]


def _less(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(some, others, strict=True)]
