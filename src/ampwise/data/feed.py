"""Batches on the device, the next one on its way while the device works on this one.

On CUDA each batch is pinned and copied on a side stream one batch ahead; the consumer's stream
waits for the copy's event, the host for nothing. On a CPU there is nothing to copy, and a reading thread
would compete with training for the same cores, so batches are simply handed on.

Either way the time the consumer had to wait for the loader is measured: a device that waits for
data gains nothing from lower precision.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ampwise.data.move import leaves, pin, to_device

SLOW_LOADER = 0.1
"""Fraction of the time spent waiting for data from which it is worth a word."""


class Feed:
    """An iterable over batches that are on `device`.

    Parameters
    ----------
    batches
        Batches on the CPU.
    device
        Where they are wanted.

    Attributes
    ----------
    wait_s
        Seconds the consumer waited for data.
    total_s
        Seconds since the first batch was asked for.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self.wait_s = 0.0
        self.total_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        started = time.perf_counter()
        moved = self._on_cuda if self._device.type == "cuda" else self._directly
        batches = moved(iter(self._batches))
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                now = time.perf_counter()
                self.wait_s += now - asked
                self.total_s = now - started
            yield batch

    @property
    def wait_fraction(self) -> float:
        """Share of the time so far that went into waiting for data, 0 to 1."""
        return self.wait_s / self.total_s if self.total_s > 0 else 0.0

    def _directly(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self._device)

    def _on_cuda(self, batches: Iterator[Any]) -> Iterator[Any]:
        side = torch.cuda.Stream(self._device)
        ahead: tuple[Any, torch.cuda.Event] | None = None
        for batch in batches:
            pinned = pin(batch)
            with torch.cuda.stream(side):
                moved = to_device(pinned, self._device)
                arrived = torch.cuda.Event()
                arrived.record(side)
            if ahead is not None:
                yield self._received(*ahead)
            ahead = (moved, arrived)
        if ahead is not None:
            yield self._received(*ahead)

    def _received(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        for _, tensor in leaves(batch):
            tensor.record_stream(stream)  # the side stream's allocator must not reuse it too soon
        return batch


def slow_loader(wait_fraction: float) -> str:
    """What to say when the device waited for data for this share of the time, 0 to 1."""
    return (
        f"the device waited {wait_fraction:.0%} of the time for data; lower precision cannot help "
        "with that: use DataLoader workers (num_workers=4), cheaper transforms, or data prepared "
        "in advance"
    )
