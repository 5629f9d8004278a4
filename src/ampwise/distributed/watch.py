"""Whether all ranks still train one model, and whether one of them keeps the others waiting.

After the first window and then every N windows each rank puts a row of int64 together,

    steps, loss scale (its bits), growth tracker             the same on all ranks
    checksum of the parameters that all ranks have           the same on all ranks
    checksum of the parts of DTensors that several have      the same on ranks with the same key
    data, forward and whole step, in us                      medians over the last N windows

gathers everyone's, and draws the conclusions that all others draw from the same rows
(`differences`). A difference ends training on all ranks with the same error, which names the rank
that differs; a rank that is slow twice in a row is named once, and training goes on.

Data is the time from the end of a backward, or of the step, to the start of the next forward; by
the host's clock on the CPU, by device events elsewhere, so that a loader that the device need not
wait for costs nothing.

No host sync: on accelerators the rows are copied to pinned memory, and read one step later.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import starmap
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ampwise.distributed.checksum import Compared
from ampwise.distributed.differences import Row, compare, slowest

FEWEST_WINDOWS = 5
"""A median of fewer says nothing about who is slow."""


class Unwatched:
    """The watch of a process that trains alone: nothing to compare.

    Attributes
    ----------
    slow_rank
        Which rank keeps the others waiting, in words; None while none does.
    """

    slow_rank: str | None = None

    def begin_forward(self) -> None:
        """A forward starts."""

    def end_forward(self) -> None:
        """The forward, if one was begun, is over, and its backward starts."""

    def end_backward(self) -> None:
        """A backward is over."""

    def close(self, steps: int, loss_scale: Callable[[], Tensor]) -> None:
        """The window is complete, as is its step."""


class Watch(Unwatched):
    """Compares ranks every few windows.

    Parameters
    ----------
    group
        The ranks that train together.
    device
        Where their parameters are.
    every
        Windows between two comparisons.
    parameters
        What is compared.
    forward_waits
        Whether forwards contain collectives.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        every: int,
        parameters: Compared,
        *,
        forward_waits: bool,
    ) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._device = device
        self._every = every
        self._parameters = parameters
        self._forward_waits = forward_waits
        # Own windows, not the step's number: ranks that differ in that must meet all the same.
        self._windows = 0
        self._good_at: int | None = None
        self._pending: tuple[Tensor, torch.Event] | None = None
        self._suspect: int | None = None
        self._reported: set[int] = set()

        self._on_cpu = device.type == "cpu"
        self._since: Any = None
        self._in_forward = False
        self._times = _Times()
        self._past: list[_Times] = []

    def begin_forward(self) -> None:
        """Data is there; a forward inside another belongs to it."""
        if self._in_forward:
            return
        self._in_forward = True
        now = self._mark()
        if self._since is not None:
            self._times.data.append((self._since, now))
        self._since = now

    def end_forward(self) -> None:
        """What follows is backward, in which ranks wait for each other."""
        if self._in_forward:
            self._in_forward = False
            self._times.forward.append((self._since, self._mark()))

    def end_backward(self) -> None:
        """What follows is data, or the rest of the step."""
        self._since = self._mark()

    def close(self, steps: int, loss_scale: Callable[[], Tensor]) -> None:
        """Compare, if it is time to; on accelerators also draw conclusions from the last step's.

        Parameters
        ----------
        steps
            Number of the step that is complete.
        loss_scale
            Gives two int64 on the device, that should be the same on all ranks: the bits of the
            loss scale, and its growth tracker. Called only when it is time.

        Raises
        ------
        DivergedRanksError
            On all ranks, when they differ.
        """
        self._settle()
        self._in_forward = False
        self._since = now = self._mark()
        self._times.end = now
        self._past.append(self._times)
        self._times = _Times(start=now)
        self._windows += 1
        if self._windows == 1 or self._windows % self._every == 0:
            self._gather(steps, loss_scale())

    def _gather(self, steps: int, loss_scale: Tensor) -> None:
        """Everyone's row, on its way to the host."""
        numbers = [dist.get_rank(), steps, self._parameters.key, *self._medians_us()]
        host = torch.tensor(numbers, pin_memory=not self._on_cpu)
        row = torch.cat(
            (host.to(self._device, non_blocking=True), loss_scale, self._parameters.checksums())
        )
        rows = torch.empty(self._size, len(row), dtype=torch.int64, device=self._device)
        dist.all_gather(list(rows.unbind()), row, group=self._group)
        if self._on_cpu:
            self._conclude(rows)
            return
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        pinned.copy_(rows, non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._pending = pinned, event

    def _settle(self) -> None:
        """Look at what was gathered in the last step of an accelerator, which is long done with."""
        if self._pending is not None:
            (rows, event), self._pending = self._pending, None
            event.synchronize()
            self._conclude(rows)

    def _conclude(self, table: Tensor) -> None:
        rows = [Row(*each) for each in table.tolist()]
        compare(rows, self._good_at)
        self._good_at = rows[0].steps
        slow = slowest(rows, forward_waits=self._forward_waits)
        if slow is None or slow.rank != self._suspect:
            self._suspect = slow.rank if slow else None
        elif slow.rank not in self._reported:
            self._reported.add(slow.rank)
            self.slow_rank = slow.text(rows[0].steps, self._every)

    # -- time --------------------------------------------------------------------------------------

    def _mark(self) -> Any:
        """A moment: of the host on the CPU, of the device's queue elsewhere."""
        if self._on_cpu:
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _ms(self, start: Any, end: Any) -> float:
        return (end - start) * 1e3 if self._on_cpu else start.elapsed_time(end)

    def _medians_us(self) -> list[int]:
        """Data, forward and whole of the windows since the last comparison; 0 if too few."""
        # The device may not have reached the end of the last window yet.
        known = len(self._past) - (not self._on_cpu)
        done, self._past = self._past[:known], self._past[known:]
        # The first window has no beginning, and libraries set themselves up in it.
        done = [each for each in done if each.start is not None]
        if len(done) < FEWEST_WINDOWS:
            return [0, 0, 0]
        spans = [(each.data, each.forward, [(each.start, each.end)]) for each in done]
        return [
            round(statistics.median(sum(starmap(self._ms, pairs)) for pairs in column) * 1e3)
            for column in zip(*spans, strict=True)
        ]


@dataclass(slots=True)
class _Times:
    """Moments of one window: when data and forwards began and ended, and the window itself."""

    start: Any = None
    end: Any = None
    data: list[tuple[Any, Any]] = field(default_factory=list)
    forward: list[tuple[Any, Any]] = field(default_factory=list)


def forward_waits(models: Iterable[nn.Module]) -> bool:
    """Whether ranks wait for each other in forward: FSDP2 gathers, DDP broadcasts buffers."""
    from torch.distributed.fsdp import FSDPModule

    layers = [layer for model in models for layer in model.modules()]
    return any(
        isinstance(each, FSDPModule)
        or (isinstance(each, DistributedDataParallel) and each.will_sync_module_buffers())
        for each in layers
    )
