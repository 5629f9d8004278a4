"""How the host learns what the device decided.

On the CPU the memory is the host's own, and reading it costs nothing. On an accelerator a read
waits for everything queued before it, so it is either asked for (`HostFlag.read`, the general
path), or avoided: `Outcomes` copies each step's flag to pinned memory and looks at it one step
later, when the copy is long done and the device already has the next step to work on.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class HostFlag:
    """A float32 scalar on a device that is 0 or 1.

    Attributes
    ----------
    on_host
        Whether reading it costs nothing.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.on_host = tensor.device.type == "cpu"
        self._value = self.on_host and bool(tensor.tolist())

    def set(self, value: bool) -> None:
        """Write the value; for flags on the host, which nothing else writes."""
        if self._value is not value:
            self._value = value
            self.tensor.fill_(value)

    def read(self) -> bool:
        """The value now; on an accelerator this waits for the device (one host sync)."""
        return self._value if self.on_host else bool(self.tensor.tolist())


class Outcomes:
    """Whether each step was skipped, in order, without stalling the device.

    Parameters
    ----------
    device
        Where the flags are.
    at_once
        Know each outcome at its own step, also on an accelerator (one host sync a step).

    Attributes
    ----------
    at_once
        Whether each outcome is known at its own step; on the CPU it always is.

    On an accelerator it is known at the next step otherwise. The lag is fixed, rather than "as soon
    as it has arrived", so that runs are reproducible.
    """

    def __init__(self, device: torch.device, *, at_once: bool = False) -> None:
        self.at_once = at_once or device.type == "cpu"
        self._pending: deque[tuple[Tensor, torch.Event]] = deque()

    def settle(self, found_inf: HostFlag) -> list[bool]:
        """Take in a step's flag; the outcomes that became known, the oldest first."""
        if self.at_once:
            return [found_inf.read()]
        known = self.drain()
        pinned = torch.empty((), pin_memory=True)
        pinned.copy_(found_inf.tensor, non_blocking=True)
        event = torch.Event(found_inf.tensor.device)
        event.record()
        self._pending.append((pinned, event))
        return known

    def last_skipped(self) -> bool:
        """Whether the last step was skipped, if that is not known yet.

        Called once the device has the next backward to work on, so that nothing stalls.
        """
        if not self._pending:
            return False
        pinned, event = self._pending[-1]
        event.synchronize()
        return bool(pinned.tolist())

    def drain(self) -> list[bool]:
        """Every outcome still on its way; waits for their copies, not for later work."""
        known: list[bool] = []
        while self._pending:
            pinned, event = self._pending.popleft()
            event.synchronize()
            known.append(bool(pinned.tolist()))
        return known
