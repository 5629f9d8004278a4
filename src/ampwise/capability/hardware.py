"""What the vendor's documentation says a device has; nothing here is measured.

For each format: the unit that multiplies matrices in it, "" where the device is known to have
none, None where that cannot be told. The CPU answers by instruction set, CUDA by compute
capability, ROCm by gfx target, XPU by its matrix engines. `torch.cuda.is_bf16_supported` is not
asked: it says yes under emulation.
"""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

FLOAT8 = "float8_e4m3fn"
"""Stands for both formats of float8: units that multiply one multiply the other."""

PROBED = ("tf32", "bfloat16", "float16", FLOAT8)
"""The formats that are compared with float32."""

_CPUINFO = Path("/proc/cpuinfo")

# Flag, as the kernel or torch spell it -> unit; the strongest first.
_BFLOAT16_UNITS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX512-BF16",
    "svebf16": "SVE-BF16",
    "sve_bf16": "SVE-BF16",
    "bf16": "BF16",
}
_FLOAT16_UNITS = {
    "amx_fp16": "AMX-FP16",
    "avx512_fp16": "AVX512-FP16",
    "asimdhp": "FP16",
    "fp16_arith": "FP16",
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and the matrix units it is documented to have.

    Attributes
    ----------
    device
        Device string, such as ``cpu`` or ``cuda:0``.
    kind
        ``cpu``, ``cuda``, ``rocm``, ``mps`` or ``xpu``.
    name
        Model name, for people.
    architecture
        Instruction set, compute capability or gfx target.
    units
        Format -> name of the unit; "" for none, None for unknown.
    """

    device: str
    kind: str
    name: str
    architecture: str
    units: Mapping[str, str | None]


def describe(device: torch.device) -> Hardware:
    """The hardware behind a device that is present."""
    if device.type == "cpu":
        return _cpu(cpu_flags(), torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return rocm(str(device), properties.name, properties.gcnArchName)
        return cuda(str(device), properties.name, (properties.major, properties.minor))
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        engines = getattr(properties, "has_subgroup_matrix_multiply_accumulate", None)
        return xpu(str(device), properties.name, engines)
    if device.type == "mps":
        return mps(platform.processor() or platform.machine(), platform.mac_ver()[0])
    return Hardware(str(device), device.type, device.type, "", dict.fromkeys(PROBED))


def cpu(flags: frozenset[str], simd: str, name: str = "") -> Hardware:
    """A CPU by its instruction-set flags (none at all: unknown)."""
    bfloat16 = _first(flags, _BFLOAT16_UNITS)
    float16 = _first(flags, _FLOAT16_UNITS)
    # oneDNN's bf16 math, the CPU's counterpart of TF32, runs on the bfloat16 units.
    float8 = _first(flags, {})  # PyTorch has a kernel for it, and uses no unit of any CPU
    units = {"tf32": bfloat16, "bfloat16": bfloat16, "float16": float16, FLOAT8: float8}
    return Hardware("cpu", "cpu", name or platform.machine(), simd, units)


def cuda(device: str, name: str, capability: tuple[int, int]) -> Hardware:
    """An NVIDIA GPU by compute capability.

    Volta brought FP16, Ampere BF16 and TF32, Ada (8.9) and Hopper (9.0) FP8.
    """
    ampere = "tensor cores" if capability >= (8, 0) else ""
    units = {
        "tf32": ampere,
        "bfloat16": ampere,
        "float16": "tensor cores" if capability >= (7, 0) else "",
        FLOAT8: "tensor cores" if capability >= (8, 9) else "",
    }
    return Hardware(device, "cuda", name, f"sm_{capability[0]}{capability[1]}", units)


def rocm(device: str, name: str, gfx: str) -> Hardware:
    """An AMD GPU by gfx target: CDNA (gfx908, 90a, 94x, 95x) and RDNA 3 on (gfx11, gfx12)."""
    target = gfx.partition(":")[0]
    matrix = "matrix cores" if re.match(r"gfx(908|90a|94|95|11|12)", target) else ""
    packed = "packed math" if re.match(r"gfx(9|10)", target) else ""
    units = {
        "tf32": "matrix cores" if re.match(r"gfx94", target) else "",
        "bfloat16": matrix,
        "float16": matrix or packed,
        FLOAT8: "matrix cores" if re.match(r"gfx(94|95|12)", target) else "",
    }
    return Hardware(device, "rocm", name, target, units)


def mps(name: str, macos: str) -> Hardware:
    """An Apple GPU: float16 always, bfloat16 by generation (measured), no TF32."""
    units = {"tf32": "", "bfloat16": None, "float16": "GPU ALU", FLOAT8: None}
    return Hardware("mps", "mps", name, f"macOS {macos}".strip(), units)


def xpu(device: str, name: str, matrix_engines: bool | None) -> Hardware:
    """An Intel GPU: all but float8 run on its XMX engines, where it has them."""
    unit = None if matrix_engines is None else "XMX" if matrix_engines else ""
    return Hardware(device, "xpu", name, "", dict.fromkeys(PROBED, unit) | {FLOAT8: None})


def multiplies_float8(device: torch.device) -> bool:
    """Whether a device has a unit for float8 that PyTorch uses; the same on all such devices."""
    return bool(describe(device).units[FLOAT8])


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this CPU, from the kernel and from torch; empty when unknown."""
    flags = {word for word, has in _torch_capabilities().items() if has is True}
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    return frozenset(flags | set(match.group(1).split() if match else ()))


def cpu_clock_mhz() -> float | None:
    """Median clock of the processors now, where the kernel says it (on x86)."""
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _cpuinfo(), re.MULTILINE)
    return statistics.median(map(float, clocks)) if clocks else None


def _torch_capabilities() -> Mapping[str, object]:
    """Torch's own detection; torch 2.9 and 2.10 have fewer words, so every name is guarded."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    helpers = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_fp16": "_is_amx_fp16_supported",
        "avx2": "_is_avx2_supported",
    }
    return {
        flag: getattr(torch.cpu, helper)()
        for flag, helper in helpers.items()
        if hasattr(torch.cpu, helper)
    }


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text()
    except OSError:
        return ""


def _cpu(flags: frozenset[str], simd: str) -> Hardware:
    match = re.search(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return cpu(flags, simd, match.group(1) if match else platform.processor())


def _first(flags: frozenset[str], names: Mapping[str, str]) -> str | None:
    """The first unit whose flag is set; "" for none of them, None when no flag is known at all."""
    if not flags:
        return None
    return next((unit for flag, unit in names.items() if flag in flags), "")
