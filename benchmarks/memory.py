"""Figure 4, memory: peak of whole training steps on charlm ``base``, and what it consists of.

The peak of live tensor bytes is the same on every CPU. Autocast halves activations and nothing
else, so what a precision saves grows with their share of the peak, and that with the batch.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from _common import save
from ampwise import Policy, load_task
from ampwise.bench.arm import Arm, Settings
from ampwise.bench.memory import measure

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = ("fp32", "bf16", "bf16-master")


def use(batch: int, precision: str, size: str) -> dict[str, Any]:
    task = load_task("charlm", {"size": size, "batch": str(batch)})
    policy = Policy.parse(precision)
    batches = list(itertools.islice(task.batches(), 2))
    found = measure(lambda: Arm(task, policy, Settings(DEVICE)), batches, DEVICE)
    return {"peak_bytes": found.peak_bytes, "parts": found.parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="base")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32, 64])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for batch in options.batches:
        by_precision = {each: use(batch, each, options.size) for each in PRECISIONS}
        baseline = by_precision["fp32"]["peak_bytes"]
        for name, found in by_precision.items():
            found["reduction"] = 1 - found["peak_bytes"] / baseline
            parts = ", ".join(f"{part} {size / 1e6:.0f}" for part, size in found["parts"].items())
            print(f"batch {batch:3d} {name:12s} {found['reduction']:6.1%} MB: {parts}", flush=True)
        results[f"batch {batch}"] = by_precision
    save(f"memory-{options.size}-{DEVICE.type}", {"peaks": results})


if __name__ == "__main__":
    main()
