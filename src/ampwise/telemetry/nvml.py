"""What the driver says of an NVIDIA GPU: its clock and what holds it down, heat, power, company.

Asked through NVML by its official client (``nvidia-ml-py``, the extra ``nvml``). The queries go to
the driver, not into a stream: they wait for no kernel, and no kernel waits for them.

The GPU is found by its UUID, then by its PCI bus id. NVML's index counts in the order of the bus,
whatever ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` say, so it may be another GPU's.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ampwise.installation import extra_command

T = TypeVar("T")

_NOT_NVIDIA = "NVML knows NVIDIA's GPUs only"
_PARTITIONED = "its clocks and power belong to all instances of a GPU in MIG mode"
_HIDDEN = "NVML's list lacks this process, so its numbers are not this container's"


@dataclass(frozen=True, slots=True)
class Reason:
    """A bit of NVML's mask of what holds the clock down.

    Attributes
    ----------
    remedy
        What to do about it; empty for a state that neither comes and goes nor means trouble.
    """

    bit: int
    words: str
    remedy: str = ""


_LOWER = "lock a lower clock (nvidia-smi -lgc)"

REASONS = (
    Reason(0x001, "idle"),
    # A clock that the user set holds still: that is what a measurement wants.
    Reason(0x002, "application clocks setting"),
    Reason(0x004, "power cap", f"raise the cap (nvidia-smi -pl), or {_LOWER}"),
    Reason(0x008, "hardware slowdown", "see to cooling and power supply (nvidia-smi -q -d CLOCK)"),
    Reason(0x010, "sync boost", "take the GPU out of its sync boost group"),
    Reason(0x020, "software thermal slowdown", f"cool the GPU, or {_LOWER}"),
    Reason(0x040, "hardware thermal slowdown", "cool the GPU: it halves its clock to save itself"),
    Reason(0x080, "power brake", "see to the server's power supply, which asks for less load"),
    Reason(0x100, "display clocks setting"),
    Reason(0x200, "board limit", _LOWER),
    Reason(0x400, "reliability limit", _LOWER),
)
"""NVML's ``nvmlClocksEventReason...`` (before driver 535: ``nvmlClocksThrottleReason...``)."""

_SLOWDOWN, _ITS_CAUSES = 0x008, 0x040 | 0x080


def reasons_in(mask: int) -> tuple[str, ...]:
    """A mask in words; a cause hides the general slowdown that it is reported with."""
    if mask & _ITS_CAUSES:
        mask &= ~_SLOWDOWN
    known = tuple(each.words for each in REASONS if mask & each.bit)
    rest = mask & ~sum(each.bit for each in REASONS)
    return (*known, f"unknown reason {rest:#x}") if rest else known


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a GPU; None is what could not be read.

    Attributes
    ----------
    clock_mhz
        Of the multiprocessors.
    throttled
        What holds the clock down, in the words of `REASONS`.
    power_w
        On many GPUs the driver's mean over the last second.
    others
        Process ids of other compute processes on the GPU.
    """

    clock_mhz: float | None = None
    throttled: tuple[str, ...] | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    others: tuple[int, ...] | None = None


class Gpu:
    """A CUDA device as its driver sees it. Nothing here raises for what the driver denies.

    Attributes
    ----------
    unread
        Field of `Reading`, or ``gpu`` for all of them -> why it could not be read.
    """

    def __init__(self, device: torch.device) -> None:
        self.unread: dict[str, str] = {}
        self._nvml: Any = None
        self._handle: Any = None
        if torch.version.hip:
            self.unread["gpu"] = _NOT_NVIDIA
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.unread["gpu"] = f"nvidia-ml-py is not installed: {extra_command('nvml')}"
            return
        self._handle = self._asked("gpu", lambda: self._open(device))

    @property
    def readable(self) -> bool:
        """Whether the driver can be asked at all."""
        return self._handle is not None

    def read(self) -> Reading:
        """The GPU now."""
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return Reading()
        return Reading(
            clock_mhz=self._asked(
                "clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            throttled=self._asked("throttled", lambda: reasons_in(self._mask())),
            temperature_c=self._asked(
                "temperature_c",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            power_w=self._asked("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            others=self._asked("others", self._others),
        )

    def _open(self, device: torch.device) -> Any:
        """A handle, or None where its figures would not be this device's own."""
        # Counted by NVML, and never taken back, as torch does it: others may use it after us.
        self._nvml.nvmlInit()
        handle = self._find(torch.cuda.get_device_properties(device))
        if self._in_mig_mode(handle):
            self.unread["gpu"] = _PARTITIONED
            return None
        return handle

    def _find(self, properties: Any) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        except nvml.NVMLError_NotFound:  # a MIG instance has a UUID of its own
            if not hasattr(properties, "pci_bus_id"):  # a torch that does not tell
                raise
            place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            bus_id = "{:08x}:{:02x}:{:02x}.0".format(*place)
            return nvml.nvmlDeviceGetHandleByPciBusId(bus_id)

    def _in_mig_mode(self, handle: Any) -> bool:
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:  # a GPU or a driver without MIG
            return False
        return bool(current)

    def _mask(self) -> int:
        """Clients before 12.535 know only the older name, as do drivers before 535."""
        nvml, handle = self._nvml, self._handle
        if hasattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons"):
            try:
                return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            except nvml.NVMLError_FunctionNotFound:
                pass
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _others(self) -> tuple[int, ...] | None:
        """In a container NVML may hide processes, or number them as the host does."""
        listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        found = {each.pid for each in listed}
        if os.getpid() not in found:
            self.unread["others"] = _HIDDEN
            return None
        return tuple(sorted(found - {os.getpid()}))

    def _asked(self, field: str, question: Callable[[], T]) -> T | None:
        """The answer; None with the driver's reason where it denies one."""
        try:
            return question()
        except self._nvml.NVMLError as error:
            self.unread[field] = f"NVML says {error}"
            return None
