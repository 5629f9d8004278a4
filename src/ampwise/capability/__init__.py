"""What a device does natively in each format, measured.

`probe` is the way in: hardware facts (`hardware`), a short matmul measurement (`matmul`, kept by
`cache`), and a verdict with its reason for each format (`classify`).
"""

from __future__ import annotations

import torch

from ampwise.capability import cache
from ampwise.capability.classify import FASTER, DeviceCapability, FormatSupport, classify, ratio
from ampwise.capability.hardware import FLOAT8, PROBED, Hardware, describe, multiplies_float8
from ampwise.capability.matmul import (
    Measurement,
    fast_float32_mode,
    float32_precision,
    measure,
)

__all__ = [
    "FASTER",
    "FLOAT8",
    "PROBED",
    "DeviceCapability",
    "FormatSupport",
    "Hardware",
    "Measurement",
    "classify",
    "fast_float32_mode",
    "float32_precision",
    "multiplies_float8",
    "present_devices",
    "probe",
    "ratio",
]

# What this process has measured: an unwritable cache must not cost a second per call.
_measured: dict[str, dict[str, Measurement]] = {}


def probe(device: str | torch.device, *, refresh: bool = False) -> DeviceCapability:
    """What `device` does in each format: measured now (under a second), or earlier and kept.

    What was measured while others took the processor is not kept for later processes.

    Parameters
    ----------
    refresh
        Measure even if a measurement of this machine, device and torch version is kept.
    """
    device = torch.device(device)
    hardware = describe(device)
    known = None if refresh else _recall(hardware)
    if known is not None:
        return classify(hardware, known, cached=True)
    measurements = {fmt: measure(device, fmt, decisive=FASTER) for fmt in PROBED}
    _keep(hardware, measurements)
    return classify(hardware, measurements)


def present_devices() -> tuple[str, ...]:
    """Every device PyTorch can use here, accelerators first; the CPU is always the last."""
    accelerators: list[str] = []
    if torch.cuda.is_available():
        # Asking for the current device would start CUDA, which forked workers do not survive.
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        accelerators += _numbered("cuda", torch.cuda.device_count(), current)
    if torch.xpu.is_available():
        accelerators += _numbered("xpu", torch.xpu.device_count(), 0)
    if torch.backends.mps.is_available():
        accelerators.append("mps")
    return (*accelerators, "cpu")


def _numbered(kind: str, count: int, current: int) -> list[str]:
    """Device strings of one kind, the current device first."""
    return [f"{kind}:{index}" for index in sorted(range(count), key=lambda i: (i != current, i))]


def _recall(hardware: Hardware) -> dict[str, Measurement] | None:
    return _measured.get(_memory_key(hardware)) or cache.load(hardware)


def _keep(hardware: Hardware, measurements: dict[str, Measurement]) -> None:
    """Remember for this process; on disk only what a busy device has not disturbed."""
    _measured[_memory_key(hardware)] = measurements
    complete = all(measured.size or measured.error for measured in measurements.values())
    if complete and all(measured.steady for measured in measurements.values()):
        cache.store(hardware, measurements)


def _memory_key(hardware: Hardware) -> str:
    return f"{cache.folder()}{cache.key(hardware)}"
