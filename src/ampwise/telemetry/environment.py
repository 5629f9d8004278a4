"""What a figure depends on beside the code: the record of machine and settings in every run.

Chosen fields only; the process's environment variables are never copied wholesale, as they hold
secrets.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import torch

from ampwise import __version__
from ampwise.capability.hardware import cpu_clock_mhz, describe
from ampwise.telemetry.nvml import Gpu


class Machine(TypedDict, total=False):
    """What reports say of `environment`."""

    device_name: str
    architecture: str
    threads: int
    torch: str
    ampwise: str


Environment = Annotated[dict[str, Any], Machine]


def named(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment with all that reports say of it, unknown where a stored one lacks it."""
    return {**dict.fromkeys(Machine.__annotations__, "unknown"), **environment}


def environment(device: torch.device) -> dict[str, Any]:
    """JSON-ready facts about this process and `device`."""
    hardware = describe(device)
    return {
        "device": str(device),
        "device_name": hardware.name,
        "architecture": hardware.architecture,
        "ampwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "float32_precision": _float32_precision(device),
        "allocator": _allocator(),
        "cuda": torch.version.cuda,
        "clocks_mhz": _clocks_mhz(device),
    }


def _float32_precision(device: torch.device) -> dict[str, str]:
    on_cpu = device.type == "cpu"
    backend: Any = torch.backends.mkldnn if on_cpu else torch.backends.cuda
    convolution: Any = torch.backends.mkldnn if on_cpu else torch.backends.cudnn
    return {
        "matmul": str(backend.matmul.fp32_precision),
        "convolution": str(convolution.conv.fp32_precision),
    }


def _allocator() -> dict[str, str | None]:
    """The C allocator's settings: on a CPU they move a step's time by a third."""
    preload = os.environ.get("LD_PRELOAD")
    return {
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "preload": os.path.basename(preload) if preload else None,  # noqa: PTH119
        "cuda": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def _clocks_mhz(device: torch.device) -> float | None:
    """The clock at this moment: of a GPU's multiprocessors, or the median of the processors'."""
    if device.type == "cuda":
        return Gpu(device).read().clock_mhz
    return cpu_clock_mhz() if device.type == "cpu" else None
