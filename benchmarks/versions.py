"""This version's step against that of another revision: time and peak memory, taking turns.

The other revision's package is taken from git, under another name, so that both run in one process
on the same models and batches. Started by torchrun, both train over DDP and FSDP2 in one group::

    python benchmarks/versions.py --against 3c150c8
    torchrun --nproc-per-node 2 benchmarks/versions.py --against 3c150c8
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _common import paired_ratio, save, show, take_turns
from ampwise import load_task
from ampwise.bench.memory import peak_on_cpu
from step import classify, cnn, mlp

BEFORE = "ampwise_before"
Made = tuple[nn.Module, Any, Callable[..., Any]]


def fetch(revision: str, folder: Path) -> None:
    """Put a revision's package into a folder, under another name."""
    archive = subprocess.run(
        ["git", "archive", revision, "src/ampwise"],
        cwd=Path(__file__).parents[1], capture_output=True, check=True,
    )  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    package = (folder / "src" / "ampwise").rename(folder / BEFORE)
    for file in package.rglob("*.py"):
        file.write_text(re.sub(r"\bampwise\b", BEFORE, file.read_text()))


def wide() -> Made:
    """An MLP as for MNIST: 784, 512, 512, 10, batches of 128."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return model, (torch.randn(128, 784), torch.randint(0, 10, (128,))), classify


def charlm(size: str) -> Callable[[], Made]:
    def make() -> Made:
        task = load_task("charlm", {"size": size, "batch": "8"})
        torch.manual_seed(0)
        return task.model(), next(iter(task.batches())), task.loss

    return make


MODELS: dict[str, tuple[Callable[[], Made], int]] = {
    "mlp": (mlp, 20),
    "mlp-wide": (wide, 4),
    "cnn": (cnn, 1),
    "charlm-small": (charlm("small"), 1),
    "charlm-base": (charlm("base"), 1),
}
"""Models, and how many steps a sample takes."""


@dataclass(frozen=True)
class Plan:
    """What both versions train, and how."""

    name: str
    precision: str
    spread: str
    accumulate: int
    undo: str

    @property
    def is_refused(self) -> bool:
        """Whether revisions before 4e7f1e9 refuse it: FSDP units in 16 bits with BatchNorm."""
        return (self.name, self.precision, self.spread) == ("cnn", "bf16-master", "fsdp")

    def __str__(self) -> str:
        return " ".join(each for each in (self.name, self.precision, self.spread) if each)


def arm(version: str, plan: Plan) -> Callable[[], Any]:
    """Whole steps of one version."""
    model, batch, loss = MODELS[plan.name][0]()
    if plan.spread:
        parallel = importlib.import_module(f"{version}.distributed")
        wrap = parallel.replicate if plan.spread == "ddp" else parallel.shard
        model = wrap(model, plan.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kind = importlib.import_module(f"{version}.step").TrainStep
    knows = "undo" in inspect.signature(kind).parameters  # which early revisions do not
    step = kind(
        model,
        optimizer,
        policy=plan.precision,
        max_grad_norm=1.0,
        accumulate=plan.accumulate,
        **({"undo": plan.undo} if knows else {}),
    )

    def run() -> None:
        step(loss, batch)
        if step.steps % 10 == 0:
            step.poll()

    return run


def compare(plan: Plan, rounds: int) -> dict[str, Any]:
    one_thread = plan.name == "mlp" or plan.spread
    torch.set_num_threads(1 if one_thread else os.cpu_count() or 1)
    versions = {"before": BEFORE, "now": "ampwise"}
    arms = {each: arm(package, plan) for each, package in versions.items()}
    samples = take_turns(arms, rounds, inner=MODELS[plan.name][1])
    arms.clear()
    time = paired_ratio(samples["now"], samples["before"])
    peaks = {each: peak(package, plan) for each, package in versions.items()}
    memory = peaks["now"] / peaks["before"]
    if not plan.spread or dist.get_rank() == 0:
        print(show(str(plan), time), f"time {memory:.3f}x memory", flush=True)
    return {"time": time, "memory": memory, "peak_bytes": peaks}


def peak(version: str, plan: Plan) -> int:
    """Peak over three steps: the least of three runs, as convolutions' scratch memory varies."""

    def run() -> None:
        made = arm(version, plan)
        for _ in range(3 * plan.accumulate):
            made()

    peaks: list[int] = []
    for _ in range(3):
        gc.collect()  # of what FSDP2 left behind: freed in the record, it would count as less
        peaks.append(peak_on_cpu(run))
    return min(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, help="a revision of this repository")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16", "bf16-master"])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--undo", default="micro-batch", choices=["micro-batch", "window"])
    options = parser.parse_args()
    spreads = ["ddp", "fsdp"] if "RANK" in os.environ else [""]
    if spreads != [""]:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        fetch(options.against, Path(folder))
        sys.path.insert(0, folder)
        plans = [
            Plan(name, precision, spread, options.accumulate, options.undo)
            for spread in spreads
            for name in options.models
            for precision in options.precisions
        ]
        results = {
            str(each): compare(each, options.rounds // (4 if each.name == "charlm-base" else 1))
            for each in plans
            if not each.is_refused
        }
    if spreads == [""] or dist.get_rank() == 0:
        parts = [
            "versions",
            *[f"accumulate-{options.undo}"] * (options.accumulate > 1),
            *["ranks"] * (spreads != [""]),
            "cpu",
        ]
        save("-".join(parts), {"against": options.against, "comparisons": results})


if __name__ == "__main__":
    main()
