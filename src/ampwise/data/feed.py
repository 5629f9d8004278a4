"""Batches on the device, the next one on its way while the device works on this one.

On CUDA each batch is pinned and copied on a side stream one batch ahead; the consumer's stream
waits for the copy's event, the host for nothing. The side stream in turn waits for the work that is
queued when a copy starts: the copy still overlaps with the step after it, and the memory of a batch
that is done with can be used for the next copy.

Elsewhere batches are simply handed on. A thread that reads ahead would compete with training for
the cores of a CPU, and draw random numbers at moments that no resumed run could repeat; worker
processes, as of a DataLoader, do neither.

The time that the device waited for data is measured, by events on CUDA and by the clock elsewhere:
a device that waits for data gains nothing from lower precision.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ampwise.data.move import pin, to_device

SLOW_LOADER = 0.1
"""Fraction of the time spent waiting for data from which it is worth a word."""


class Feed:
    """An iterable over batches that are on `device`.

    Parameters
    ----------
    batches
        Batches on the CPU, in any nesting that `to_device` knows.
    device
        Where they are wanted.

    Attributes
    ----------
    wait_s
        Seconds the device waited for data; on CUDA as far as it is known by now.
    total_s
        Seconds from when the first batch was asked for until the latest was there.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self.wait_s = 0.0
        self.total_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        waits = _DeviceWaits(self._device) if self._device.type == "cuda" else _HostWaits()
        moved = self._ahead if self._device.type == "cuda" else self._directly
        batches = moved(iter(self._batches))
        started = time.perf_counter()
        while True:
            waits.begin()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.wait_s += waits.end()
                self.total_s = time.perf_counter() - started
            yield batch

    @property
    def wait_fraction(self) -> float:
        """Share of the time so far that went into waiting for data, 0 to 1."""
        return min(1.0, self.wait_s / self.total_s) if self.total_s > 0 else 0.0

    def _directly(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self._device)

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        side = torch.cuda.Stream(self._device)
        waiting: tuple[Any, torch.cuda.Event] | None = None
        for batch in batches:
            pinned = pin(batch)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                moved = to_device(pinned, self._device)
                arrived = torch.cuda.Event()
                arrived.record(side)
            if waiting is not None:
                yield self._received(*waiting)
            waiting = (moved, arrived)
        if waiting is not None:
            yield self._received(*waiting)

    def _received(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return batch


class _HostWaits:
    """The consumer's own waiting: it works itself, or waits for the device in its step."""

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self) -> float:
        return time.perf_counter() - self._since


class _DeviceWaits:
    """Idle time of a stream between the work queued before a batch was asked for and after.

    When the host is ahead, both events pass one after the other however long the loader took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        self._since = self._event()

    def end(self) -> float:
        """Seconds of waiting that have become known; nothing is waited for to know more."""
        self._open.append((self._since, self._event()))
        known_ms = 0.0
        while self._open and self._open[0][1].query():
            since, until = self._open.popleft()
            known_ms += since.elapsed_time(until)
        return known_ms / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def slow_loader(wait_fraction: float) -> str:
    """What to say when the device waited for data for this share of the time, 0 to 1."""
    return (
        f"the device waited {wait_fraction:.0%} of the time for data; lower precision cannot help "
        "with that: use DataLoader workers (num_workers=4), cheaper transforms, or data prepared "
        "in advance"
    )
