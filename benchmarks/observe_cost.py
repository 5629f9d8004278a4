"""What `ampwise run` costs a script: its steps observed, against the same steps alone.

One process a script. The hooks are put into torch and taken out again in turns of a few steps, so
that both arms train the same model side by side, whatever else the machine does; what counts are
paired ratios and differences of neighbouring turns. Times are of the thread's processor, and so
free of what other processes take; `wall` is beside them. The C library's allocator is told to keep
what it has: page faults, which move with every allocation, would drown the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from _common import paired_ratio, save, show
from ampwise.observe.run import Observation, RunConfig
from ampwise.observe.script import Target
from observed.gpt import GPT, get_batch
from observed.mnist import Net

Step = Callable[[], object]


def mlp(*, width: int = 64, layers: int = 2, scaled: bool = False) -> Step:
    torch.manual_seed(0)
    depth = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*depth, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(64, width), torch.randint(10, (64,))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def scaled_step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return scaled_step if scaled else step


def gpt(width: int, *, clip: bool) -> Step:
    torch.manual_seed(0)
    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(*get_batch())[1]
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def cnn() -> Step:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters())
    rows = TensorDataset(torch.rand(512, 1, 28, 28), torch.randint(10, (512,)))

    def endless() -> Iterator[list[Tensor]]:
        while True:
            yield from DataLoader(rows, 32)

    batches = endless()

    def step() -> None:
        x, y = next(batches)
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


SCRIPTS: dict[str, tuple[Callable[[], Step], int]] = {
    "MLP": (mlp, 20),
    "MLP, float16 and scaler, clipped": (lambda: mlp(scaled=True), 20),
    "200 modules, small": (lambda: mlp(layers=100), 10),
    "GPT, 0.8 M parameters, clipped": (lambda: gpt(128, clip=True), 2),
    "GPT, 0.8 M parameters": (lambda: gpt(128, clip=False), 2),
    "GPT, 12.7 M parameters, clipped": (lambda: gpt(512, clip=True), 1),
    "GPT, 12.7 M parameters": (lambda: gpt(512, clip=False), 1),
    "CNN with a DataLoader": (cnn, 2),
}
"""Each script's step, and the steps of a turn."""


KEEP = {name: str(2 * 10**9) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")}
"""Environment under which freed memory stays with the process, from its start."""


class Switch:
    """Observation that can be put in and taken out while training."""

    def __init__(self) -> None:
        self.observed = Observation(RunConfig(Target("script.py")), lambda *_: None)

    def on(self) -> None:
        for each in self.observed._things:
            each.install(self.observed._patches)
        self.observed.session.active = True

    def off(self) -> None:
        self.observed.session.active = False
        self.observed._patches.undo()


def measure(make: Callable[[], Step], steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of both arms."""
    step, switch = make(), Switch()
    times: dict[str, list[float]] = {"alone": [], "observed": []}
    wall: dict[str, list[float]] = {"alone": [], "observed": []}
    for number in range(rounds + 5):
        for name in ("alone", "observed") if number % 2 else ("observed", "alone"):
            if name == "observed":
                switch.on()
            step()  # the first one after a switch looks up again what the interpreter had cached
            began, wall_began = time.thread_time(), time.perf_counter()
            for _ in range(steps):
                step()
            spent, lasted = time.thread_time() - began, time.perf_counter() - wall_began
            if name == "observed":
                switch.off()
            if number >= 5:
                times[name].append(1e3 * spent / steps)
                wall[name].append(1e3 * lasted / steps)
    pairs = list(zip(times["observed"], times["alone"], strict=True))
    return {
        "alone_ms": statistics.median(times["alone"]),
        "cost_ms": statistics.median(a - b for a, b in pairs),
        "cost": paired_ratio(times["observed"], times["alone"]),
        "wall": paired_ratio(wall["observed"], wall["alone"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not KEEP.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, (make, steps) in SCRIPTS.items():
        if args.only not in name:
            continue
        found = results[name] = measure(make, steps, args.rounds)
        label = f"{name} ({found['alone_ms']:.2f} ms, +{found['cost_ms']:.3f})"
        print(show(f"{label:56s}", found["cost"]), show("wall", found["wall"]).split("wall")[1])
    if args.save:
        save("observe-cost-cpu", {"rounds": args.rounds, "scripts": results})


if __name__ == "__main__":
    main()
