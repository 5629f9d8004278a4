"""Training whose updates are followed in float64: what they add up to, and what they should have.

A task is trained once more from its beginning, with a float64 shadow of its updates that lives as
long as the training. The gradients are those of the run; what an update makes of them, and all that
is kept from one to the next, has a shadow: parameters, state of optimizers, averages of weights. So
the shadow has the same updates without rounding, added up without rounding. Compared are changes:
an average of weights may be right to three digits, and yet never have moved.

Only what feeds on itself from one update to the next is compared, as only there an error grows. A
copy of float32 master weights in 16 bits is none of it. Where an iteration is the task's own, or
the model has buffers that code of its own may write to, forward and backward are shadowed, too, as
averages may be made there.

Cost: the steps once more; where their updates compute in 16 bits, and only there, an update in
float64 beside each.
"""

from __future__ import annotations

import math
import time
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.bench.arm import Arm
from ampwise.data import to_device
from ampwise.numerics.observe.exact import HALF
from ampwise.numerics.observe.gradient_errors import NOISE_DB, GradientErrors
from ampwise.numerics.observe.range_losses import RangeLoss
from ampwise.numerics.observe.shadow import Rounds, Shadow
from ampwise.numerics.updates.kept import (
    PARAMETERS,
    Change,
    Feedback,
    Rounding,
    Values,
    kept,
    own_buffers,
)
from ampwise.numerics.updates.of_task import Trained, each_update
from ampwise.numerics.updates.update import one_by_one
from ampwise.places import placing
from ampwise.step.replay import Replay
from ampwise.tasks.checks import endless

MATRIX_DB = 4.0
"""SQNR of the change of a weight matrix below which it is wrong; of all `NOISE_DB`."""
_BY_CHANCE = 1e-3
"""Change in exact arithmetic, beside the actual one, of what holds only what rounding lost."""
_TOO_FAR = 4.0
"""Times that parameters change more than they should by which they are taken to have got lost."""
_GATE = 2
"""Updates after which it is known whether any of them computes in 16 bits."""
LIMIT_S = 60.0


@dataclass
class Followed:
    """Training, and what its updates should have made.

    Attributes
    ----------
    changes
        Of what feeds on itself.
    roundings
        Where updates round to 16 bits, in order.
    draws
        Whether updates draw random numbers: then they round by chance, which loses nothing.
    gradients
        What each update was given, by parameter.
    began
        Of parameters in 16 bits that were asked for, what they were then.
    updates
        How many steps were not skipped.
    range_losses
        What became inf, or 0, where the shadow rounds.
    """

    arm: Arm
    batches: Iterator[Any]
    steps: int = 0
    changes: list[Change] = field(default_factory=list[Change])
    roundings: list[Rounding] = field(default_factory=list[Rounding])
    draws: bool = False
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    began: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    updates: int = 0
    range_losses: list[RangeLoss] = field(default_factory=list[RangeLoss])

    @property
    def is_deliberate(self) -> bool:
        """Whether what rounding loses is kept: by chance, or in a compensation.

        A parameter is none: it may have gone much too far.
        """
        return self.draws or any(
            bool(each.actual.norm() > 0)
            and bool(each.ideal.norm() < _BY_CHANCE * each.actual.norm())
            for each in self.changes
            if each.kind != PARAMETERS
        )

    @property
    def went_too_far(self) -> bool:
        """Whether parameters are wrong, and have changed much more than they should."""
        mine = [each for each in self.changes if each.kind == PARAMETERS]
        moved = sum(float(each.actual.square().sum()) for each in mine)
        should = sum(float(each.ideal.square().sum()) for each in mine)
        return PARAMETERS in self.wrong() and moved > _TOO_FAR**2 * should

    def errors(self) -> dict[str, GradientErrors]:
        """Of changes against what they should be, by kind: state in 16 bits first."""
        kinds = sorted({each.kind for each in self.changes}, key=lambda kind: kind == PARAMETERS)
        return {kind: GradientErrors(*self._of(kind)) for kind in kinds}

    def _of(self, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = [each for each in self.changes if each.kind == kind]
        return {e.name: e.actual for e in mine}, {e.name: e.ideal for e in mine}

    def wrong(self) -> dict[str, GradientErrors]:
        """The same, of what did not change as it should; nothing where that is meant."""
        found = {} if self.is_deliberate else self.errors()
        return {kind: each for kind, each in found.items() if is_wrong(each)}

    def kept_of_db(self, ideal: Mapping[str, Tensor]) -> float:
        """The least SQNR of a kind against changes that are given, in dB."""
        kinds: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        for each in self.changes:
            if each.name in ideal:
                actual, wanted = kinds.setdefault(each.kind, ({}, {}))
                actual[each.name], wanted[each.name] = each.actual, ideal[each.name]
        return min((GradientErrors(*pair).sqnr_db for pair in kinds.values()), default=math.inf)

    def kept_db(self) -> float:
        """The least SQNR of a kind, in dB."""
        return min((each.sqnr_db for each in self.errors().values()), default=math.inf)


def is_wrong(errors: GradientErrors) -> bool:
    """Whether changes are not what they should be: by the limits of gradients that mend."""
    low = errors.sqnr_db < NOISE_DB or bool(errors.noisy(MATRIX_DB))
    return errors.norm > 0 and (low or bool(errors.missing()))


def rounds_updates(trained: Trained, arm: Arm) -> bool:
    """Whether updates of a task compute in 16 bits, or keep something in them.

    At no price for torch's own optimizers of float32 parameters.

    Parameters
    ----------
    arm
        What was trained.
    """
    buffers = own_buffers(arm.model)
    kept = [*arm.model.parameters(), *buffers.values()]
    if are_torchs(arm) and not buffers and not any(each.dtype in HALF for each in kept):
        return False
    if any(each.dtype in HALF for each in buffers.values()):
        return True
    return bool(follow(trained, _GATE, shadowed=False).roundings)


def are_torchs(arm: Arm) -> bool:
    """Whether all that updates do is done by optimizers of torch's."""
    return not arm.iteration.makes_updates and all(map(_is_torchs, arm.step.optimizers))


def _is_torchs(optimizer: Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def follow(
    trained: Trained,
    steps: int,
    *,
    shadowed: bool = True,
    rounds: Rounds | None = None,
    given: Iterable[Mapping[str, Tensor]] | None = None,
    also: Container[str] = (),
    began: Mapping[str, Tensor] | None = None,
) -> Followed:
    """Train a task from its beginning, with its updates beside float64.

    Parameters
    ----------
    shadowed
        False to see only where updates round.
    rounds
        Operations at which the shadow rounds, too.
    given
        Gradients for each update, in place of its own.
    also
        Names of state that is looked at in float32, too, and of parameters in 16 bits.
    began
        Parameters that begin as these, in place of their own values.
    """
    since = time.monotonic()
    with placing([]) as places:
        mode = Shadow(places, errors=False, at=None, rounds=rounds) if shadowed else None
        feeds = Feedback(places, also)
        with feeds.inside(mode):
            arm = Arm(trained.task, trained.policy, trained.settings)
            begins = _begins(arm, also, began or {})
        groups = [each for one in arm.step.optimizers for each in one.param_groups]
        one_by_one(groups)
        batches = (to_device(each, arm.step.device) for each in endless(trained.task))
        found = Followed(arm, batches, began=begins)
        turns = _Gradients(found, None if given is None else iter(given))
        first = Values(mode)
        first.note(kept(arm, feeds))
        while found.steps < steps and time.monotonic() - since < LIMIT_S:
            feeds.begin(kept(arm, feeds))
            _step(
                arm, [next(batches) for _ in range(trained.settings.accumulate)], feeds, mode, turns
            )
            held = kept(arm, feeds)
            feeds.end(held)
            first.note(held)
            found.steps += 1
        found.updates = feeds.updates
        found.roundings, found.draws = list(feeds.roundings.values()), feeds.draws
        if mode is not None:
            found.range_losses = mode.range_losses.found
            found.changes = [
                first.change(each)
                for each in kept(arm, feeds)
                if each.name in feeds.accumulates and first.knows(each)
            ]
    return found


def _begins(arm: Arm, also: Container[str], began: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What parameters in 16 bits are that are asked for; first they become what is given."""
    named = dict(arm.model.named_parameters())
    with torch.no_grad():
        for name in named.keys() & began.keys():
            named[name].copy_(began[name])
    return {n: e.detach().clone() for n, e in named.items() if e.dtype in HALF and n in also}


class _Gradients:
    """Notes what updates are given, or has them be given what others were."""

    def __init__(self, found: Followed, given: Iterator[Mapping[str, Tensor]] | None) -> None:
        self._found, self._given = found, given

    def at_update(self) -> None:
        """An update is about to begin."""
        arm = self._found.arm
        scale = float(arm.step.loss_scale.scale)
        held = {n: e for n, e in Replay(arm.step).named_tensors().items() if e.grad is not None}
        wanted = {} if self._given is None else next(self._given, {})
        for name, each in held.items():
            assert each.grad is not None
            if name in wanted:
                each.grad.copy_(wanted[name] * scale)
        if self._given is None:
            self._found.gradients.append(
                {n: e.grad.detach() / scale for n, e in held.items() if e.grad is not None}
            )


def _step(
    arm: Arm, window: Sequence[Any], feeds: Feedback, mode: Shadow | None, gradients: _Gradients
) -> None:
    """A step; an update of it begins with the gradients that are there."""

    def update(make: Callable[[], None], _: Sequence[Optimizer]) -> bool:
        gradients.at_update()
        for each in Replay(arm.step).named_tensors().values():
            if each.grad is not None:
                feeds.anew(each.grad)
                if mode is not None:
                    mode.source(each.grad)
        with feeds.in_update():
            make()
        return False

    if arm.iteration.makes_updates:
        with feeds.inside(mode):
            each_update(arm, window[0], update)
        return
    forward_too = bool(own_buffers(arm.model))
    with feeds.inside(mode) if forward_too else nullcontext():
        for batch in window:
            arm.iteration.again(arm.step, batch)
    with feeds.inside(mode):
        update(arm.step.update, ())
