"""Who else used the machine while it was measured: what makes a figure doubtful, in numbers.

Paired ratios survive a drifting machine, but not one that others use in bursts. Three things say
so, each a share of the time between `Watch` and its `read`: tasks that waited for a processor
(``/proc/pressure/cpu``), time the hypervisor gave to others (steal), and processors that other
processes of this machine kept busy. A GPU is sampled between turns (`gpu_watch`).
What a system does not offer is left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ampwise.bench.gpu_watch import GpuRecord, GpuWatch

PRESSURE_MAX = 0.05
STEAL_MAX = 0.02
OTHERS_MAX = 0.25
_CLOSE = "close other programs"


@dataclass(frozen=True)
class Contamination:
    """Shares of the measured time; None where the system does not say.

    Attributes
    ----------
    pressure
        Share of the time in which some task waited for a processor.
    steal
        Share of processor time that the hypervisor gave to other guests.
    others
        Processors that other processes kept busy, on average.
    gpu
        What the GPU went through; None on other devices.
    """

    pressure: float | None = None
    steal: float | None = None
    others: float | None = None
    gpu: GpuRecord | None = None

    def complaints(self) -> list[str]:
        """What is beyond its limit, and what to do about it; empty for a quiet machine."""
        said: list[str] = []
        if self.pressure is not None and self.pressure > PRESSURE_MAX:
            said.append(f"tasks waited for a processor {self.pressure:.0%} of the time: {_CLOSE}")
        if self.steal is not None and self.steal > STEAL_MAX:
            said.append(
                f"the hypervisor took {self.steal:.0%} of the processors' time: use a machine that "
                "is not shared"
            )
        if self.others is not None and self.others > OTHERS_MAX:
            said.append(f"other processes kept {self.others:.1f} processors busy: {_CLOSE}")
        return said + ([] if self.gpu is None else self.gpu.complaints())


class Watch:
    """Counts from its making to `read`."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = GpuWatch(device) if device.type == "cuda" else None
        self._before = _counters()

    def after_turn(self, arm: str) -> None:
        """Look at the device that an arm just used."""
        if self._gpu is not None:
            self._gpu.sample(arm)

    def read(self) -> Contamination:
        """What others took so far."""
        before, now = self._before, _counters()
        wall = max(now["wall"] - before["wall"], 1e-9)

        def spent(name: str) -> float | None:
            if name not in before or name not in now:
                return None
            return max(0.0, now[name] - before[name])

        busy, own, steal, total = (spent(each) for each in ("busy", "own", "steal", "total"))
        return Contamination(
            pressure=None if (waited := spent("waited")) is None else waited / wall,
            steal=None if steal is None or not total else steal / total,
            others=None if busy is None or own is None else max(0.0, busy - own) / wall,
            gpu=None if self._gpu is None else self._gpu.read(),
        )


def _counters() -> dict[str, float]:
    """Seconds since some start, by name."""
    times = os.times()
    found = {"wall": time.monotonic(), "own": times.user + times.system}
    pressure, system = Path("/proc/pressure/cpu"), Path("/proc/stat")
    with contextlib.suppress(OSError, IndexError, ValueError):
        found["waited"] = int(pressure.read_text().split("total=")[1].split()[0]) / 1e6
    try:
        fields = [int(each) for each in system.read_text().split("\n", 1)[0].split()[1:9]]
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, kernel, _idle, _wait, irq, softirq, steal = (each / ticks for each in fields)
        found["busy"] = user + nice + kernel + irq + softirq
        found["steal"], found["total"] = steal, sum(fields) / ticks
    except (OSError, ValueError):
        pass
    return found
