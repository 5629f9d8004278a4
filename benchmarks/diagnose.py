"""What a diagnosis costs: the recorder armed, the watched replay, the float64 shadow, end to end.

The first three take turns with a plain step (forward and backward) of the same model on the same
batch. End to end is wall time: the library call in this process, and the command in a new one, both
on a model of 10 million parameters whose feed-forward overflows float16 in its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _common import paired_ratio, save, show, take_turns
from _replays import rehearsed
from ampwise import Task, TrainStep, diagnose, load_task
from ampwise.bench.memory import peak_on_cpu
from ampwise.data import to_device
from ampwise.numerics.observe.shadow import shadow
from ampwise.numerics.observe.trace import watch
from ampwise.step.recorder import Recorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wi, self.wo = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wo(torch.relu(self.wi(self.norm(x))))


class TenMillion(nn.Module):
    """Nine feed-forward blocks of width 384; what one of them adds is too large for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(384) for _ in range(9))
        nn.init.normal_(self.blocks[5].wo.weight, std=5000.0)
        self.head = nn.Linear(384, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(nn.functional.layer_norm(x, x.shape[-1:]))


def task() -> Task:
    """The 10-million-parameter model, as a task for the command."""
    generator = torch.Generator().manual_seed(0)
    batch = (
        torch.randn(16, 16, 384, generator=generator),
        torch.randint(0, 10, (16, 16), generator=generator),
    )
    return Task(
        model=TenMillion,
        batches=lambda: [batch],
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]).flatten(0, 1).float(),
                                                      b[1].flatten()),
        name="ten-million",
    )  # fmt: skip


def charlm_step(precision: str) -> tuple[TrainStep, Callable[..., Any], Any]:
    found = load_task("charlm", {"size": "small"})
    torch.manual_seed(0)
    model = found.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = TrainStep(model, optimizer, policy=precision)
    return step, found.loss, to_device(next(iter(found.batches())), DEVICE)


def recorder(precision: str, rounds: int) -> dict[str, Any]:
    """Whole steps with the flight recorder armed, over steps without."""
    step, loss, batch = charlm_step(precision)

    def run(armed: bool) -> Callable[[], object]:
        def one() -> None:
            step.recorder = Recorder() if armed else None
            step(loss, batch)

        return one

    times = take_turns({"plain": run(False), "armed": run(True)}, rounds, warm_up=2)
    ratio = paired_ratio(times["armed"], times["plain"])
    print(show(f"{precision}: recorder armed and idle", ratio))
    return ratio


def replays(precision: str, rounds: int) -> dict[str, Any]:
    """Watched and shadowed replays of a step, over a plain replay; peak memory of each."""
    step, loss, batch = charlm_step(precision)
    step(loss, batch)  # the optimizer's state is there, as in training
    again, stash = rehearsed(step, loss, batch)
    arms: dict[str, Callable[[], object]] = {
        "plain": lambda: again.replay(stash),
        "watched": lambda: watch(again, stash),
        "shadow": lambda: shadow(again, stash, errors=False),
        "shadow with errors": lambda: shadow(again, stash),
    }
    times = take_turns(arms, rounds, warm_up=1)
    found: dict[str, Any] = {}
    for name in arms:
        if name != "plain":
            found[name] = {"time": paired_ratio(times[name], times["plain"])}
            print(show(f"{precision}: {name} replay", found[name]["time"]))
    if DEVICE.type == "cpu":
        for name, run in arms.items():
            found.setdefault(name, {})["peak_bytes"] = peak_on_cpu(run)
            print(f"{precision}: {name} replay allocates {found[name]['peak_bytes'] / 1e6:.0f} MB")
    return found


def end_to_end() -> dict[str, float]:
    """Seconds of the library call and of the command, on the 10-million-parameter model.

    Beside them the time of one of its steps: where float16 is emulated, that is most of it.
    """
    found = task()
    model = found.model().to(DEVICE)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy="fp16")
    start = time.perf_counter()
    step(found.loss, to_device(next(iter(found.batches())), DEVICE))
    one_step = time.perf_counter() - start
    start = time.perf_counter()
    diagnosis = diagnose(task(), "fp16", device=DEVICE)
    library = time.perf_counter() - start
    assert diagnosis.cause == "RANGE_OVERFLOW", diagnosis
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ampwise", "diagnose", str(Path(__file__).resolve()), "--quiet",
            "--out", f"{folder}/run",
        ]  # fmt: skip
        start = time.perf_counter()
        with contextlib.chdir(Path(__file__).parent):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    assert done.returncode == 1, done.stderr
    print(
        f"10 million parameters: library {library:.1f} s, command {seconds:.1f} s; "
        f"one step {one_step:.1f} s"
    )
    return {"library_s": library, "command_s": seconds, "step_s": one_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    results: dict[str, Any] = {"model": "charlm small", "recorder": {}, "replays": {}}
    for precision in ("fp32", "bf16"):
        results["recorder"][precision] = recorder(precision, rounds)
        results["replays"][precision] = replays(precision, max(3, rounds // 3))
    results["end_to_end"] = end_to_end()
    save(f"diagnose-{DEVICE.type}", results)


if __name__ == "__main__":
    main()
