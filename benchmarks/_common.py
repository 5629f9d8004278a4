"""What the benchmarks share: arms that take turns, paired ratios, and the record of the machine."""

from __future__ import annotations

import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def take_turns(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    inner: int = 1,
    warm_up: int = 5,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds per call of each arm, one sample of `inner` calls a round."""

    def timed(run: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                run()
            synchronize()
            return (time.perf_counter() - start) * 1e3 / inner

        return sample

    for run in arms.values():
        for _ in range(warm_up):
            run()
    return sample_in_turns({name: timed(run) for name, run in arms.items()}, rounds)


def sample_in_turns(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """One sample of each arm a round, as the arm itself measures it; shuffled every round.

    Garbage collection runs between samples, not inside.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order, shuffle = list(arms), random.Random(0).shuffle
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                samples[name].append(arms[name]())
            gc.collect(0)
    finally:
        gc.enable()
    return samples


def paired_ratio(slow: list[float], fast: list[float], resamples: int = 2000) -> dict[str, float]:
    """Median of ``slow / fast`` over rounds, with a 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples)
    )
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
    return {"median": statistics.median(ratios), "low": low, "high": high}


def machine() -> dict[str, Any]:
    """Processor, cores, torch and what else a reader needs to place the figures."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
        flags = set(next((x for x in lines if x.startswith("flags")), "").split())
    return {
        "cpu": cpu,
        "isa": sorted(flags & {"amx_bf16", "avx512_bf16", "avx512_fp16", "avx512f", "avx2"}),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write a benchmark's results with the machine named, and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    print(f"written to {path}")
    return path


def show(name: str, ratio: Mapping[str, float]) -> str:
    """``name 1.75x [1.73, 1.80]``"""
    return f"{name:44s} {ratio['median']:6.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
