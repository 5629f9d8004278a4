"""From hardware and measurement to a verdict: native, emulated or unsupported, and why.

A format *gains* when its matmul is at least `FASTER` = 1.1 times as fast as float32. Paired
medians lie within 5 % of the truth 99 % of the time on a loaded machine, so 1.1 measured is more
than 1.04 in truth: `auto` never picks a slower format by mistake. Nothing real lies near: units
give 1.5x to 16x, emulation 0.003x to 0.9x.

=================  ==============  ==========================================================
documented unit    measured        verdict
=================  ==============  ==========================================================
none, of float8    raises          emulated: torchao multiplies in float32 there
any other          raises          unsupported
yes                >= 0.5          native (and gains from 1.1 on)
yes                < 0.5           emulated: PyTorch does not use the unit
unknown            >= 1.1          native
unknown            < 1.1           emulated
none               >= 1.5          native: the measurement outweighs the documentation
none               < 1.5           emulated
=================  ==============  ==========================================================

Everything here is a pure function of plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ampwise.capability.hardware import FLOAT8, Hardware
from ampwise.capability.matmul import Measurement

FASTER = 1.1
"""Speedup from which a format is said to gain."""

CLEARLY_FASTER = 1.5
"""Speedup from which a measurement outweighs documentation that says there is no unit."""

USED = 0.5
"""Speedup below which a unit that is there cannot be the one that did the work."""

Verdict = Literal["native", "emulated", "unsupported"]


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """What a device does in one format.

    Attributes
    ----------
    format
        Dtype name, or ``tf32``.
    verdict
        ``native``, ``emulated`` or ``unsupported``.
    gains
        Whether matmuls are faster than in float32 (by at least `FASTER`, where measured).
    unit
        The documented hardware unit; "" for none, None for unknown.
    measured
        The probe's result.
    reason
        A sentence with the figures.
    """

    format: str
    verdict: Verdict
    gains: bool
    unit: str | None
    measured: Measurement
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceCapability:
    """What a device does in each format; `cached` tells an earlier measurement from a new one."""

    hardware: Hardware
    formats: Mapping[str, FormatSupport]
    cached: bool = field(default=False, compare=False)

    @property
    def device(self) -> str:
        """Device string, such as ``cpu`` or ``cuda:0``."""
        return self.hardware.device

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda``, ``rocm``, ``mps`` or ``xpu``."""
        return self.hardware.kind


def classify(
    hardware: Hardware, measurements: Mapping[str, Measurement], *, cached: bool = False
) -> DeviceCapability:
    """The capability of a device from its hardware and what was measured on it."""
    formats = {
        fmt: _support(fmt, hardware, measurements.get(fmt, Measurement())) for fmt in hardware.units
    }
    return DeviceCapability(hardware, formats, cached)


def _support(fmt: str, hardware: Hardware, measured: Measurement) -> FormatSupport:
    unit = hardware.units[fmt]
    verdict = _verdict(fmt, unit, measured)
    faster = bool(unit) if measured.speedup is None else measured.speedup >= FASTER
    gains = verdict == "native" and faster
    reason = _reason(fmt, hardware, measured, verdict, gains)
    return FormatSupport(fmt, verdict, gains, unit, measured, reason)


def _verdict(fmt: str, unit: str | None, measured: Measurement) -> Verdict:
    if measured.error:
        return "emulated" if fmt == FLOAT8 and unit == "" else "unsupported"
    if measured.speedup is None:
        return "native" if unit else "emulated"
    needed = FASTER if unit is None else USED if unit else CLEARLY_FASTER
    return "native" if measured.speedup >= needed else "emulated"


def _reason(
    fmt: str, hardware: Hardware, measured: Measurement, verdict: Verdict, gains: bool
) -> str:
    """One sentence: what, on what, which verdict, because of which unit and figure."""
    subject = f"{_noun(fmt, hardware.kind)} on {_place(hardware)} is {verdict}"
    if measured.error:
        return f"{subject}: {measured.error}"
    said = f"{subject}{_unit_clause(fmt, hardware, verdict)}"
    if verdict == "native" and not gains:
        said += " but gains nothing"
    return f"{said}: {_figure(measured)}"


def _figure(measured: Measurement) -> str:
    """The measurement in words: ``0.35x of float32, measured at 512x512``."""
    if measured.speedup is None:
        return "not measured"
    return f"{ratio(measured.speedup)} of float32, measured at {measured.size}x{measured.size}"


def ratio(value: float) -> str:
    """A speed ratio with the digits that mean something: ``3.2x``, ``0.35x``, ``0.008x``."""
    return (
        f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"
    )


def _unit_clause(fmt: str, hardware: Hardware, verdict: Verdict) -> str:
    unit = hardware.units[fmt]
    if verdict == "native":
        return f" ({unit})" if unit else ""
    if unit:
        return f" ({unit} is there, but PyTorch does not use it)"
    needed = "bfloat16" if fmt == "tf32" and hardware.kind == "cpu" else fmt
    return "" if unit is None else f" (no {needed} unit)"


def _noun(fmt: str, kind: str) -> str:
    if fmt == "tf32":
        return "bf16 math for float32 matmuls" if kind == "cpu" else "TF32 matmul"
    return f"{fmt} matmul"


def _place(hardware: Hardware) -> str:
    return "this CPU" if hardware.kind == "cpu" else f"{hardware.name} ({hardware.architecture})"
