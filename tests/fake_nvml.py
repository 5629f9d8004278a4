"""A stand-in for `pynvml`, NVIDIA's client: its names and constants, figures that a test sets.

`test_nvml.test_the_fake_is_like_the_real_client` compares it with the real one. It has no way to
get at a GPU by index, on purpose.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace

import torch

UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
BUS_ID = "00000000:65:00.0"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 4: "Insufficient Permissions", 13: "Function Not Found"}.get(
            self.value, f"code {self.value}"
        )


class NVMLError_NotFound(NVMLError): ...


class NVMLError_FunctionNotFound(NVMLError): ...


class FakeNvml(ModuleType):
    """Attributes in lower case are the GPU's state; `denied` maps functions to what they raise."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    nvmlClocksThrottleReasonGpuIdle = 0x001
    nvmlClocksThrottleReasonApplicationsClocksSetting = 0x002
    nvmlClocksThrottleReasonSwPowerCap = 0x004
    nvmlClocksThrottleReasonHwSlowdown = 0x008
    nvmlClocksThrottleReasonSyncBoost = 0x010
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x020
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x040
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x080
    nvmlClocksThrottleReasonDisplayClockSetting = 0x100
    nvmlClocksThrottleReasonBoardLimit = 0x200
    nvmlClocksThrottleReasonReliability = 0x400
    NVMLError = NVMLError
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.uuids, self.bus_ids = {f"GPU-{UUID}"}, {BUS_ID}
        self.clock_mhz, self.mask, self.celsius, self.milliwatts = 1980, 0, 60, 412_500
        self.pids: Iterable[int] = [os.getpid()]
        self.mig = 0
        self.denied: dict[str, NVMLError] = {}

    def _answer(self, name: str, value):
        if name in self.denied:
            raise self.denied[name]
        return value

    def nvmlInit(self):
        return self._answer("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise NVMLError_NotFound(self.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId):
        if pciBusId not in self.bus_ids:
            raise NVMLError_NotFound(self.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetMigMode(self, device):
        return self._answer("nvmlDeviceGetMigMode", [self.mig, self.mig])

    def nvmlDeviceGetClockInfo(self, handle, type):  # noqa: A002 - as the client calls it
        assert (handle, type) == ("handle", self.NVML_CLOCK_SM)
        return self._answer("nvmlDeviceGetClockInfo", self.clock_mhz)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer("nvmlDeviceGetCurrentClocksEventReasons", self.mask)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", self.mask)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", self.celsius)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("nvmlDeviceGetPowerUsage", self.milliwatts)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        listed = [SimpleNamespace(pid=each, usedGpuMemory=None) for each in self.pids]
        return self._answer("nvmlDeviceGetComputeRunningProcesses", listed)


def install(monkeypatch, uuid: str = UUID) -> FakeNvml:
    """The fake as `pynvml`, and a CUDA device for it, on a machine that has none."""
    fake = FakeNvml()
    properties = SimpleNamespace(
        name="a GPU",
        major=9,
        minor=0,
        uuid=uuid,
        pci_domain_id=0,
        pci_bus_id=0x65,
        pci_device_id=0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    return fake
