"""What happened in each step, written on the device and read when it has arrived.

A step writes one row of float32 scalars into a ring on the device: loss, loss scale before and
after, grad norm, found_inf. Every `CHUNK` rows the ring's new part is copied to pinned memory
without waiting. `poll` turns what has arrived into `StepRecord`s; `drain` waits for the rest. On
the CPU a row is a list of numbers, and can be read as soon as it is written. The last `HISTORY`
records stay, read or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""Rows between two copies to the host, on accelerators."""

HISTORY = 10_000
"""Records that are kept."""

COLUMNS = 5
"""A row holds loss, loss scale before and after, grad norm and found_inf."""

Row = Tensor | list[float]
"""A tensor on an accelerator; on the CPU, where a number costs less than a kernel, a list."""


def number(scalar: Tensor) -> float:
    """Of a scalar in the host's own memory: no operator runs, so nothing can synchronise."""
    value: Any = scalar.tolist()
    return value


def write(row: Row, figures: Sequence[Tensor | float]) -> None:
    """Fill a row with scalars that are on its device; for the host's own, also with numbers."""
    if isinstance(row, list):
        row[:] = [number(each) if isinstance(each, Tensor) else each for each in figures]
    else:
        tensors: Any = figures
        torch.stack(tensors, out=row)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, made or skipped.

    Attributes
    ----------
    step
        Its number, from 1; skipped steps count.
    loss
        Weighted mean of the window's losses, unscaled.
    loss_scale
        Scale its gradients were computed under; 1 where nothing is scaled.
    grad_norm
        Global L2 norm of the true gradients, before clipping; inf or NaN with `found_inf`.
    found_inf
        Whether any gradient was inf or NaN.
    lr
        Learning rate of the first parameter group in this step.
    skipped
        Whether parameters were left as they were (all optimizers, or any with ``skip="each"``).
    skipped_total, scale_growths, scale_backoffs
        Totals since training began, this step included.
    """

    step: int
    loss: float
    loss_scale: float
    grad_norm: float
    found_inf: bool
    lr: float
    skipped: bool
    skipped_total: int
    scale_growths: int
    scale_backoffs: int


@dataclass(slots=True)
class Totals:
    """Counters over all records so far."""

    steps: int = 0
    skipped: int = 0
    growths: int = 0
    backoffs: int = 0


class Ring:
    """Rows written by the step, records read by everyone else.

    Parameters
    ----------
    device
        Where rows are written.
    totals
        What was counted before.
    chunk
        Rows the ring holds on the device before they are copied to the host.
    """

    def __init__(
        self, device: torch.device, totals: Totals | None = None, chunk: int = CHUNK
    ) -> None:
        self.totals = totals or Totals()
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._chunk = chunk
        self._numbers = [[math.nan] * COLUMNS for _ in range(chunk if self._on_cpu else 0)]
        self._rows = torch.zeros(0 if self._on_cpu else chunk, COLUMNS, device=device)
        self._slots = self._rows.unbind()
        self._lrs: list[float | Tensor] = []
        self._in_flight: deque[tuple[Tensor, list[float | Tensor], torch.Event]] = deque()
        self._records: deque[StepRecord] = deque(maxlen=HISTORY)
        self._unread = 0

    @property
    def row(self) -> Row:
        """Where the next step's row goes (`write`)."""
        return (self._numbers or self._slots)[len(self._lrs)]

    def written(self, lr: float | Tensor) -> None:
        """The next row is written; `lr` belongs to it."""
        self._lrs.append(lr.detach().clone() if isinstance(lr, Tensor) else lr)
        if len(self._lrs) == self._chunk:
            self._send()

    def poll(self) -> list[StepRecord]:
        """Records that have arrived since the last call of `poll` or `drain`; never waits."""
        if self._on_cpu:
            self._send()
        self._land()
        return self._new()

    def drain(self) -> list[StepRecord]:
        """All records since the last call of `poll` or `drain`; waits for the device."""
        self._arrive()
        return self._new()

    @property
    def history(self) -> list[StepRecord]:
        """All records that are kept, the oldest first; waits for the device."""
        self._arrive()
        return list(self._records)

    @property
    def complete_totals(self) -> Totals:
        """What was counted in all steps; waits for the device."""
        self._arrive()
        return self.totals

    def _new(self) -> list[StepRecord]:
        count, self._unread = min(self._unread, len(self._records)), 0
        return [self._records[index] for index in range(-count, 0)]

    def _arrive(self) -> None:
        """Wait for all rows."""
        self._send()
        while self._in_flight:
            self._in_flight[0][2].synchronize()
            self._receive()

    def _send(self) -> None:
        """Start the copy of the filled rows to the host, and reuse the ring."""
        lrs, self._lrs = self._lrs, []
        if not lrs:
            return
        if self._on_cpu:
            self._record(self._numbers[: len(lrs)], lrs)
            return
        self._land()  # also where nobody polls, so that no more than a few copies are kept
        # Later rows go to the same memory on the same stream, after this copy.
        pinned = torch.empty(len(lrs), COLUMNS, pin_memory=True)
        pinned.copy_(self._rows[: len(lrs)], non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._in_flight.append((pinned, lrs, event))

    def _land(self) -> None:
        """Take in what has arrived."""
        while self._in_flight and self._in_flight[0][2].query():
            self._receive()

    def _receive(self) -> None:
        rows, lrs, _ = self._in_flight.popleft()
        self._record(rows.tolist(), lrs)

    def _record(self, rows: Sequence[Sequence[float]], lrs: list[float | Tensor]) -> None:
        totals = self.totals
        for (loss, scale, next_scale, norm, found), lr in zip(rows, lrs, strict=True):
            skipped = found > 0
            totals.steps += 1
            if skipped:
                totals.skipped += 1
            if next_scale != scale:
                totals.growths += next_scale > scale
                totals.backoffs += next_scale < scale
            self._records.append(
                StepRecord(
                    totals.steps,
                    loss,
                    scale,
                    norm,
                    skipped,
                    float(lr),
                    skipped,
                    totals.skipped,
                    totals.growths,
                    totals.backoffs,
                )
            )
        self._unread += len(rows)
