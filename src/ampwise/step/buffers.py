"""Module buffers that forward writes, put back when the step is skipped.

BatchNorm updates its running statistics in forward, before anyone knows that the step will be
skipped: one inf in a batch leaves NaN in them for good, and only evaluation shows it. So the
buffers that forward writes are copied at the start of a window and, if its step is skipped,
written back; on an accelerator without asking the host.

Which buffers those are is observed: normalisation layers that track statistics (their kernel
writes without counting a version), and any other whose version counter has moved. In the first
window, when nothing has been observed yet, all buffers are copied.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(slots=True)
class _Slot:
    """Where a buffer hangs; the tensor itself may be replaced (`Module.to` does)."""

    owner: nn.Module
    name: str
    written: bool | None  # None: not observed yet
    version: int = -1

    @property
    def tensor(self) -> Tensor | None:
        return self.owner._buffers.get(self.name)


class BufferGuard:
    """Remembers what forward is about to overwrite in some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = {id(layer): layer for module in modules for layer in module.modules()}
        self._slots = [
            _Slot(layer, name, True if _tracks_statistics(layer) else None)
            for layer in layers.values()
            for name in layer._buffers
        ]
        self._copies: list[tuple[Tensor, Tensor]] | None = None

    def remember(self) -> None:
        """Copy the buffers at the start of a window; until `settle`, further calls do nothing."""
        if self._copies is not None:
            return
        self._copies = []
        for slot in self._slots:
            tensor = slot.tensor
            if tensor is None:
                continue
            if slot.written is not False:
                self._copies.append((tensor, tensor.clone()))
            slot.version = tensor._version

    @contextmanager
    def kept(self) -> Generator[None]:
        """Context: what forward writes inside does not stay."""
        before = [(t, t.clone()) for slot in self._slots if (t := slot.tensor) is not None]
        yield
        with torch.no_grad():
            for tensor, copy in before:
                tensor.copy_(copy)

    def undo(self) -> None:
        """Put the buffers back where the window began, and leave it open."""
        with torch.no_grad():
            for buffer, copy in self._copies or ():
                buffer.copy_(copy)

    def settle(self, found_inf: Tensor) -> None:
        """End the window: where `found_inf` is 1, write the copies back."""
        copies, self._copies = self._copies, None
        if copies is None:
            return
        for slot in self._slots:
            if slot.written is not True:
                tensor = slot.tensor
                slot.written = tensor is not None and tensor._version != slot.version
        if not copies or (found_inf.device.type == "cpu" and not found_inf.numpy()):
            return
        for buffer, copy in copies:
            skipped = found_inf.to(buffer.device) > 0
            with torch.no_grad():
                buffer.copy_(torch.where(skipped, copy, buffer))


def _tracks_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and layer.track_running_stats
