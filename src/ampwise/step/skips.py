"""What follows a step on the host: the limit of skipped steps, the schedule, the EMA.

Skipping is how the loss scale settles: from 2**16 down to its floor takes 30 skipped steps in a row
at most. The default limit, 50, is beyond that, so settling never aborts and needs no exception.

The host may learn of a skipped step one step late (`host`). The schedule has then moved on already,
and is held at the next step instead: the same number of steps in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ampwise.errors import SkippedStepsError
from ampwise.policy import Policy
from ampwise.step import arguments
from ampwise.step.members import Members
from ampwise.telemetry.ring import StepRecord

_HALF = (torch.float16, torch.bfloat16)


class Skips:
    """The skipped steps that are known, as far as they still matter.

    Parameters
    ----------
    limit
        Skipped steps in a row after which training aborts.
    known
        Steps whose outcome is known.
    skipped
        How many of them were skipped.

    Attributes
    ----------
    in_a_row
        How many were skipped since one was made.
    to_hold
        Schedule steps to leave out yet.
    """

    def __init__(self, limit: int, known: int = 0, skipped: int = 0) -> None:
        self.limit = limit
        self.known = known
        self.skipped = skipped
        self.in_a_row = 0
        self.to_hold = 0

    def learn(self, outcomes: Iterable[bool]) -> None:
        """Take in whether steps were skipped, in order."""
        for skipped in outcomes:
            self.known += 1
            self.skipped += skipped
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            self.to_hold += skipped

    def holds(self) -> bool:
        """Whether the schedule stands still at this step; asked once a step."""
        held = self.to_hold > 0
        self.to_hold -= held
        return held

    def scheduled(self, steps: int) -> int:
        """How many steps the schedule has made after so many of training, this one included."""
        return steps - (self.skipped - self.to_hold)

    @property
    def exhausted(self) -> bool:
        """Whether the limit is reached."""
        return self.in_a_row >= self.limit


class _InFloat32:
    """What an average reads of a model, its 16-bit parameters (of `bf16-pure`) in float32."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = model.buffers
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        """Its parameters."""
        return (each.detach().float() for each in self._model.parameters())


def _as_averaged(model: nn.Module, ema: AveragedModel) -> Any:
    """A model as its average can take it in: PyTorch's wants parameters of its own dtypes."""
    pairs = zip(model.parameters(), ema.module.parameters(), strict=True)
    differ = any(each.dtype in _HALF and own.dtype == torch.float32 for each, own in pairs)
    return _InFloat32(model) if differ else model


class Followers:
    """What makes a step with each optimizer step: schedule and EMA.

    Parameters
    ----------
    scheduler
        Steps with the optimizers; None without one.
    ema
        Average of a model's parameters; None without one.
    members
        What is trained; the average is of the first model.
    optimizers
        Those the schedule must be of one of.
    """

    def __init__(
        self,
        scheduler: Any,
        ema: AveragedModel | None,
        members: Members,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.scheduler = scheduler
        self.ema = ema
        self._members = members
        self.check(optimizers)

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Whether both can follow the models and these optimizers; raises UsageError if not."""
        arguments.check_schedule(self.scheduler, optimizers)
        arguments.check_ema(self.ema, self._members.models[0])

    def follow(self, scheduled: int | None, *, skipped: bool) -> None:
        """A step is over; the EMA follows unless it was `skipped`.

        The schedule makes its step of number `scheduled`; None: it is held.
        """
        if self.ema is not None and not skipped:
            self.ema.update_parameters(_as_averaged(self._members.models[0], self.ema))
        if self.scheduler is None or scheduled is None:
            return
        if arguments.goes_by_updates(self.scheduler):
            self.scheduler.step_update(scheduled)
        else:
            self.scheduler.step()


def explain(history: Sequence[StepRecord], in_a_row: int, policy: Policy) -> SkippedStepsError:
    """The error that says what was seen in a run of skipped steps, and what to do."""
    run = history[-in_a_row:]
    first, last = run[0], run[-1]
    where = f"steps {first.step} to {last.step} were all skipped: gradients inf or NaN"
    if policy.loss_scaling:
        where += f", whatever the loss scale ({first.loss_scale:g} down to {last.loss_scale:g})"
    if math.isfinite(last.loss):
        cause = (
            f"the loss is finite ({last.loss:.4g}), so backward breaks: look for sqrt, norm, "
            "division or log near zero, or keep the module in float32"
        )
    else:
        cause = (
            f"the loss itself is {last.loss:g}, so forward breaks: look at the batch of step "
            f"{first.step} and at values beyond the format's range"
        )
        if policy.compute_dtype == "float16":
            cause += ", or try bf16"
    kept = f"parameters are as after step {first.step - 1}"
    return SkippedStepsError(f"{where}; {cause}; {kept}")
