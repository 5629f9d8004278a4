"""What to pick on this machine: the capability of every device, and the choice that follows.

Computed here as plain values; `ampwise.report.advise` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampwise import capability
from ampwise.capability import FLOAT8, PROBED, DeviceCapability, FormatSupport, cache
from ampwise.policy import FP16_ON_CPU, PRESETS, Resolution, choose_device, resolve

SCHEMA = "ampwise.advise/1"


@dataclass(frozen=True, slots=True)
class DeviceAdvice:
    """One device's capability, and what ``auto`` makes of it."""

    capability: DeviceCapability
    pick: Resolution

    @property
    def sentence(self) -> str:
        """What to use on this device, and why, in one sentence."""
        device, formats = self.capability.device, self.capability.formats
        if chosen := formats.get(self.pick.policy.compute_format):
            fits = [p for p in PRESETS.values() if p.compute_format == chosen.format]
            presets = [each.name for each in fits if not each.pure]  # those that change no model
            return (
                f"Try {' or '.join(presets)} on {device}: {chosen.reason}. That is a guess from "
                "matrix products: --precision auto races them on the first step of a training."
            )
        if any(support.gains for support in formats.values()):
            return f"Keep fp32 on {device}: only float16 is faster, and {FP16_ON_CPU}."
        return f"Keep fp32 on {device}: none of {', '.join(PROBED)} is faster than float32 there."

    @property
    def on_float8(self) -> str:
        """What fp8 is good for on this device, in one sentence."""
        support = self.capability.formats[FLOAT8]
        what = {
            "native": "fp8 has to be asked for: measure it, compiled, with ampwise bench "
            "--precisions bf16,fp8 --compile",
            "emulated": "fp8 runs emulated here, for its numerics only",
            "unsupported": "fp8 cannot run here, not even emulated",
        }
        return f"{what[support.verdict]}: {support.reason}."


@dataclass(frozen=True, slots=True)
class AdviseReport:
    """The advice for each device, the best device first.

    Attributes
    ----------
    note
        What is to be said about the choice of devices; may be empty.
    """

    torch_version: str
    threads: int
    devices: tuple[DeviceAdvice, ...]
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """The report as plain values, ``schema`` first."""
        return {
            "schema": SCHEMA,
            "torch": self.torch_version,
            "threads": self.threads,
            "note": self.note,
            "devices": [_device_json(advice) for advice in self.devices],
        }


def advise(device: str | None = None, *, refresh: bool = False) -> AdviseReport:
    """Probe `device`, or every device present, and say what to use.

    With `refresh` what steps were raced in is forgotten, too.

    Raises
    ------
    UsageError
        For a device that PyTorch does not know, or an index that is not present.
    """
    devices: Sequence[str] = capability.present_devices()
    note = ""
    if refresh:
        cache.forget("race")
    if device is not None:
        chosen, note, _ = choose_device(device, devices)
        devices = (chosen,)
    return AdviseReport(
        torch_version=str(torch.__version__),
        threads=torch.get_num_threads(),
        devices=tuple(_advise(name, refresh) for name in devices),
        note=note,
    )


def _advise(device: str, refresh: bool) -> DeviceAdvice:
    supported = capability.probe(device, refresh=refresh)
    return DeviceAdvice(supported, resolve("auto", device))


def _device_json(advice: DeviceAdvice) -> dict[str, object]:
    hardware = advice.capability.hardware
    return {
        "device": hardware.device,
        "kind": hardware.kind,
        "name": hardware.name,
        "architecture": hardware.architecture,
        "cached": advice.capability.cached,
        "formats": [_format_json(support) for support in advice.capability.formats.values()],
        "pick": advice.pick.to_json(),
        "advice": advice.sentence,
        "float8": advice.on_float8,
    }


def _format_json(support: FormatSupport) -> dict[str, object]:
    measured = support.measured
    ratios = {"median": measured.speedup, "low": measured.low, "high": measured.high}
    return {
        "format": support.format,
        "unit": support.unit,
        "verdict": support.verdict,
        "gains": support.gains,
        "speedup": ratios if measured.speedup is not None else None,
        "size": measured.size,
        "reason": support.reason,
    }
