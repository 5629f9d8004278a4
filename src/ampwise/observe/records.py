"""What each step gave: a line in ``steps.jsonl``, and the totals.

Figures are written on the device and read when they have arrived (`telemetry.ring`), so that a step
costs no host sync. A step's line is written when the next one begins: only then is it known what
the loss scale became, and whether the schedule was held.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.observe.listener import Listener
from ampwise.observe.optimizers import gradients_of, norm_of
from ampwise.observe.result import ScaleSeen, Skip
from ampwise.observe.scalers import Scalers
from ampwise.observe.schedules import Schedules
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt, Step
from ampwise.telemetry import names
from ampwise.telemetry.ring import Ring, StepRecord, write

_READ_EVERY = 16
_WARM_UP = 3
_TIMES = 20_000
"""Times that are kept for the median."""
_FOLLOWS = 0.5
"""Share of the steps in which a schedule moves that steps with the optimizer."""


@dataclass(slots=True)
class _Ended:
    """A step that has ended, until the next one says what became of it."""

    step: Step
    lr: float | None
    scheduled: int
    moved: bool | None = None


class _Blanks(NamedTuple):
    """What a row holds where there is nothing: on its device, and numbers where that is the host.

    To read a tensor takes a microsecond or two, and the host knows these.
    """

    nothing: Tensor | float
    zero: Tensor | float
    one: Tensor | float

    @classmethod
    def on(cls, device: torch.device) -> _Blanks:
        """Those of a device."""
        values = math.nan, 0.0, 1.0
        return cls(*values if device.type == "cpu" else torch.tensor(values).to(device).unbind())


def _lr(optimizer: Optimizer) -> float | None:
    """The first group's learning rate, where the host knows it."""
    lr = optimizer.param_groups[0].get("lr")
    return float(lr) if isinstance(lr, int | float) else None


class Records(Listener):
    """All steps.

    Parameters
    ----------
    sink
        Gets each step's number and metrics.
    """

    def __init__(
        self,
        session: Session,
        scalers: Scalers,
        schedules: Schedules,
        sink: Callable[[int, Mapping[str, names.Metric]], None],
    ) -> None:
        self.steps = 0
        self.waited_s = 0.0
        self.losses: list[float] = []
        self._session, self._scalers, self._schedules, self._sink = (
            session, scalers, schedules, sink,
        )  # fmt: skip
        self._ring: Ring | None = None
        self.device = torch.device("cpu")
        self._blanks = _Blanks.on(self.device)
        self._at_update: tuple[float | None, int] = (None, 0)
        self._pending: _Ended | None = None
        self._ended: deque[_Ended] = deque()
        self._micro_batches: deque[int] = deque(maxlen=_TIMES)
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._spent: deque[float] = deque(maxlen=_TIMES)
        self._skips: list[tuple[int, bool | None]] = []
        self._moves: list[int] = [0, 0]
        self._scale: ScaleSeen | None = None

    # -- while the script runs ---------------------------------------------------------------------

    def gradients_ready(self, optimizer: Optimizer) -> None:
        """The norm, unless clipping said it."""
        segment = self._session.segment
        if segment.norm is None:
            segment.norm = norm_of(gradients_of(optimizer))

    def attempted(self, attempt: Attempt) -> None:
        """The norm of what a scaler decided on; and what became of the step before."""
        norm = self._session.step.segments[-1].norm
        if norm is None and attempt.scale is not None:
            # True ones by now: a fused optimizer, too, leaves them so where it does not skip.
            norm = norm_of(gradients_of(attempt.optimizer))
        attempt.norm = norm
        if self._pending is not None:
            self._settle(attempt.scale)
        self._at_update = (_lr(attempt.optimizer), self._schedules.stepped)

    def step_ends(self, step: Step) -> None:
        """Keep it until the next."""
        if self._pending is not None:  # Ctrl-C came while its line was made
            self._settle(None)
        self.steps = step.number
        self._pending = _Ended(step, *self._at_update)

    def read(self) -> None:
        """Read what has arrived of the steps that have ended; never waits.

        For loops that say when a step is over: schedule and loss scale have moved by then.
        """
        self._settle_last(last=False)
        if self._ring is not None:
            self._take(self._ring.poll())

    def finish(self) -> None:
        """The script has ended: read everything, wait for the device."""
        self._settle_last(last=True)
        if self._ring is not None:
            self._take(self._ring.drain())

    def _settle_last(self, *, last: bool) -> None:
        if self._pending is not None:
            live = self._scalers.live
            self._settle(live[0]._scale if live else None, last=last)

    def _settle(self, scale: Tensor | None, *, last: bool = False) -> None:
        """Write the row of the step that has ended; `scale` is what came of its loss scale."""
        ended = self._pending
        assert ended is not None
        by_hand = _lr(ended.step.attempts[-1].optimizer) != ended.lr
        ended.moved = None if last else self._schedules.stepped > ended.scheduled or by_hand
        if self._ring is None:
            self.device = _device_of(ended.step)
            self._ring = Ring(self.device)
            self._blanks = _Blanks.on(self.device)
        write(self._ring.row, _figures(ended.step, scale, self.device, self._blanks))
        self._ring.written(ended.lr if ended.lr is not None else float("nan"))
        self._ended.append(ended)
        self._pending = None
        if len(self._ended) >= min(_READ_EVERY, self.steps):
            self._take(self._ring.poll())

    def _take(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._one(record, self._ended.popleft())

    def _one(self, record: StepRecord, ended: _Ended) -> None:
        step = ended.step
        if record.skipped:
            self._skips.append((step.number, ended.moved))
        elif ended.moved is not None:
            self._moves[0] += 1
            self._moves[1] += ended.moved
        if step.scaled:
            self._note_scale(record)
        self.losses = [*self.losses[:1], record.loss]
        line = _line(record, ended, len(self._skips))
        self.waited_s += line[names.WAITED_S]
        self._micro_batches.append(line[names.MICRO_BATCHES])
        if not step.watched and step.number > _WARM_UP:
            self._times.append(line[names.STEP_S])
            self._spent.append(step.spent_s)
        self._sink(step.number, line)

    def _note_scale(self, record: StepRecord) -> None:
        before, scale = self._scale, record.loss_scale
        self._scale = ScaleSeen(
            first=scale if before is None else before.first,
            last=scale,
            lowest=scale if before is None else min(before.lowest, scale),
            growths=record.scale_growths,
            backoffs=record.scale_backoffs,
        )

    # -- afterwards --------------------------------------------------------------------------------

    @property
    def scale(self) -> ScaleSeen | None:
        """The loss scale; None where nothing was scaled."""
        return self._scale

    @property
    def micro_batches(self) -> float | None:
        """Median number in a step."""
        return float(statistics.median(self._micro_batches)) if self._micro_batches else None

    @property
    def step_ms(self) -> float | None:
        """Median time of a step, in milliseconds."""
        return 1e3 * statistics.median(self._times) if self._times else None

    @property
    def spent_ms(self) -> float | None:
        """Median of what observing took of a step, in milliseconds."""
        return 1e3 * statistics.median(self._spent) if self._spent else None

    def skips(self) -> list[Skip]:
        """Steps that were skipped, and whether the schedule was held in them."""
        made, moved = self._moves
        follows = moved > _FOLLOWS * made if made else any(moved for _, moved in self._skips)
        return [
            Skip(step, (None if moved is None else not moved) if follows else None)
            for step, moved in self._skips
        ]


def _device_of(step: Step) -> torch.device:
    """Where its figures are."""
    losses = (each for segment in step.segments for each in segment.losses)
    norms = (each.norm for each in step.attempts if each.norm is not None)
    return next((each.device for each in (*losses, *norms)), torch.device("cpu"))


def _figures(
    step: Step, next_scale: Tensor | None, device: torch.device, blanks: _Blanks
) -> tuple[Tensor | float, ...]:
    """Loss, loss scale before and after, norm, found_inf, each in as few operations as can be."""

    def there(value: Tensor) -> Tensor:
        if value.dtype is torch.float32 and value.device == device and not value.dim():
            return value
        return value.detach().float().reshape(()).to(device, non_blocking=True)

    losses = [there(each) for segment in step.segments for each in segment.losses]
    norms = [there(each.norm) for each in step.attempts if each.norm is not None]
    scale = next((each.scale for each in step.attempts if each.scale is not None), None)
    before = blanks.one if scale is None else there(scale)
    after = before if scale is None or next_scale is None else there(next_scale)
    found = [
        there(each.skipped) if isinstance(each.skipped, Tensor) else torch.ones((), device=device)
        for each in step.attempts
        if each.skipped is not False
    ]
    norm = _one_of(norms, blanks.nothing, torch.linalg.vector_norm)
    loss = _one_of(losses, blanks.nothing, torch.sum)
    return loss, before, after, norm, _one_of(found, blanks.zero, torch.sum)


def _one_of(
    values: list[Tensor], none: Tensor | float, together: Callable[[Tensor], Tensor]
) -> Tensor | float:
    """The only one; several put together; `none` where there is none."""
    if len(values) < 2:
        return values[0] if values else none
    return together(torch.stack(values))


def _line(record: StepRecord, ended: _Ended, skipped_total: int) -> dict[str, Any]:
    """A step's metrics by name."""
    step = ended.step
    seconds, samples = step.seconds, step.samples
    # Without a scaler that guards, a step with gradients that are not finite is made all the same.
    normed = any(each.norm is not None for each in step.attempts)
    line: dict[str, Any] = {
        names.LOSS: record.loss,
        names.LR: record.lr,
        names.LOSS_SCALE: record.loss_scale,
        names.GRAD_NORM: record.grad_norm,
        names.FOUND_INF: record.skipped or (normed and not math.isfinite(record.grad_norm)),
        names.SKIPPED: record.skipped,
        names.SKIPPED_TOTAL: skipped_total,
        names.STEP_S: seconds,
        names.WAITED_S: step.waited_s,
        names.MICRO_BATCHES: step.micro_batches,
        names.SAMPLES: samples,
    }
    if step.scaled:
        line[names.SCALE_GROWTHS] = record.scale_growths
        line[names.SCALE_BACKOFFS] = record.scale_backoffs
    if ended.moved is not None:
        line[names.SCHEDULE_MOVED] = ended.moved
    if samples and seconds > 0:
        line[names.SAMPLES_PER_S] = samples / seconds
    return line
