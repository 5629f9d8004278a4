"""How fast matmuls run in a format, against float32 on the same device, in a fraction of a second.

Both arms stay resident and take turns (f32, x, x, f32, f32, x, ...), so that load and clock
drift hit both alike; the figure is the median of the paired ratios. Sizes double from 128 until

- the float32 product takes long enough for the device to be busy, not waiting (5 ms),
- the format turns out hopeless (ten times slower: emulated float16 can be 300 times slower,
  and would take seconds a call one size further; two rounds are enough to see that), or
- the next size would not fit the time budget.

The largest size reached counts: native formats win only once the matrix is large enough to
hide the overhead. A 2-core AMX CPU shows bfloat16 at 0.8x for N=128 and 6.8x for N=2048.

Global state is left as found: the random state, autocast and the float32 precision switches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise.capability.hardware import FLOAT8
from ampwise.clock import done_at
from ampwise.errors import kind_and_words

SIZES = (128, 256, 512, 1024, 2048, 4096)
BUDGET_S = 0.25
"""Time for one format, all sizes together."""

_ROUNDS = 5
_MAX_ROUNDS = 15
_LONG_ENOUGH_MS = 5.0
_HOPELESS = 0.1
_STEADY = 3.0
_ENOUGH_TO_GIVE_UP = 2
"""Rounds after which what is hopeless is not timed any more."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One format's matmul speed on one device.

    Attributes
    ----------
    size
        Rows and columns of the square matrices; 0 when nothing could be timed.
    speedup
        float32 time over this format's time, median over rounds; None when not measured.
    low, high
        Smallest and largest ratio of a round.
    error
        What PyTorch said when it refused to multiply in this format.
    """

    size: int = 0
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    error: str = ""

    @property
    def steady(self) -> bool:
        """Whether the rounds agree, as they do unless others take the processor meanwhile.

        What is hopeless is so in every round, however far they lie apart.
        """
        if self.low is None or self.high is None or self.high < 2 * _HOPELESS:
            return True
        return self.high <= _STEADY * self.low


def measure(
    device: torch.device, fmt: str, *, decisive: float, budget_s: float = BUDGET_S
) -> Measurement:
    """Matmul speed of `fmt` (a dtype name, or ``tf32``) relative to strict float32.

    Parameters
    ----------
    decisive
        The ratio that decides; when rounds fall on both sides of it, more are taken.
    """
    deadline = time.monotonic() + budget_s
    result = Measurement()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for size in SIZES:
            began = time.monotonic()
            try:
                reference = _ready(device, "float32", size)
            except RuntimeError:  # no memory left, or forbidden: nothing to compare with
                return result
            try:
                arm = _ready(device, fmt, size)
            except torch.OutOfMemoryError:
                return result
            except (RuntimeError, TypeError, ValueError) as error:
                return result if result.size else Measurement(error=kind_and_words(error))
            # Starting a device and building kernels can take seconds, and says nothing.
            deadline += time.monotonic() - began
            ratios = _paired_ratios(reference, arm, decisive, deadline)
            result = Measurement(size, statistics.median(ratios), min(ratios), max(ratios))
            if _stop_at(reference, arm, result, deadline):
                break
    return result


@contextmanager
def float32_precision(device_type: str, mode: str) -> Generator[None]:
    """Inside, float32 matmuls of a device type run as ``ieee``, ``tf32`` or ``bf16``."""
    switch = _float32_switch(device_type)
    if switch is None:
        yield
        return
    before = switch.fp32_precision
    switch.fp32_precision = mode
    try:
        yield
    finally:
        switch.fp32_precision = before


def fast_float32_mode(device_type: str) -> str:
    """What the ``tf32`` preset asks of float32 matmuls: TF32, on CPUs oneDNN's bf16 math."""
    return "bf16" if device_type == "cpu" else "tf32"


class _Arm:
    """A matrix product in one format, ready to run; `fastest_ms` is the fastest call so far."""

    def __init__(self, device: torch.device, fmt: str, size: int) -> None:
        dtype = _dtype(device, fmt)
        # An own generator: the user's random state must not move.
        generator = torch.Generator(device).manual_seed(0)
        left, right = (
            torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in "ab"
        )
        self.device = device
        self.mode = fast_float32_mode(device.type) if fmt == "tf32" else "ieee"
        self.product = _product(left, right)
        self.fastest_ms = float("inf")

    def run_ms(self) -> float:
        """Milliseconds of one product, until the device has finished it."""
        with float32_precision(self.device.type, self.mode):
            start = time.perf_counter()
            self.product()
            elapsed_ms = (done_at(self.device) - start) * 1e3
        self.fastest_ms = min(self.fastest_ms, elapsed_ms)
        return elapsed_ms


def _ready(device: torch.device, fmt: str, size: int) -> _Arm:
    """An arm whose kernels are built and whose pages are touched."""
    arm = _Arm(device, fmt, size)
    arm.run_ms()
    return arm


def _dtype(device: torch.device, fmt: str) -> torch.dtype:
    """What matrices of a format are in; AMD's first units of float8 have their own encoding."""
    if fmt == FLOAT8 and torch.version.hip is not None:
        target = torch.cuda.get_device_properties(device).gcnArchName
        return torch.float8_e4m3fnuz if target.startswith("gfx94") else torch.float8_e4m3fn
    return torch.float32 if fmt == "tf32" else getattr(torch, fmt)


def _product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    if left.dtype.itemsize == 1:
        one, right = torch.ones((), device=left.device), right.t()
        return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _paired_ratios(reference: _Arm, arm: _Arm, decisive: float, deadline: float) -> list[float]:
    """float32 time over format time, round by round; the order alternates."""
    ratios: list[float] = []
    while len(ratios) < _ROUNDS or (
        len(ratios) < _MAX_ROUNDS
        and min(ratios) < decisive < max(ratios)
        and time.monotonic() < deadline
    ):
        if len(ratios) % 2:
            format_ms, float32_ms = arm.run_ms(), reference.run_ms()
        else:
            float32_ms, format_ms = reference.run_ms(), arm.run_ms()
        ratios.append(float32_ms / format_ms)
        if len(ratios) == _ENOUGH_TO_GIVE_UP and max(ratios) < _HOPELESS:
            break
    return ratios


def _stop_at(reference: _Arm, arm: _Arm, result: Measurement, deadline: float) -> bool:
    """Whether a larger size is needless, hopeless or too expensive."""
    if result.speedup is None or result.speedup < _HOPELESS:
        return True
    if reference.fastest_ms >= _LONG_ENOUGH_MS:
        return True
    next_size_s = 8 * (reference.fastest_ms + arm.fastest_ms) * (_ROUNDS + 2) / 1e3
    return time.monotonic() + next_size_s > deadline


def _float32_switch(device_type: str) -> Any:
    """The object whose `fp32_precision` governs float32 matmuls on a device type, if any."""
    if device_type == "cuda":
        return torch.backends.cuda.matmul
    if device_type in ("cpu", "xpu"):
        return torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return None
