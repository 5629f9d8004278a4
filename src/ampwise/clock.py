"""A clock that waits for the device: what was asked of it is done when the time is told."""

from __future__ import annotations

import time

import torch


def done_at(device: torch.device) -> float:
    """Seconds on the monotonic clock, once `device` has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
