"""ampwise lint over torch's own Python files: time, and beside torchfix on the same files.

The whole tree is timed without cache, in two processes and in one, and again with the cache. Beside
torchfix, which has no processes or cache of its own, both check the same random files one after
another in one process each, taking turns. ``pip install torchfix`` first.

    python benchmarks/lint.py [FILES]
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from _common import save

TREE = Path(torch.__file__).parent


def timed(command: list[str], **environment: str) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(command[:6])}: {done.stderr}")
    return time.perf_counter() - began


def main(count: int) -> None:
    files = sorted(TREE.rglob("*.py"))
    size = sum(each.stat().st_size for each in files)
    lint = [sys.executable, "-m", "ampwise", "lint", "--quiet", "--statistics"]
    with tempfile.TemporaryDirectory() as cache:
        own = {"AMPWISE_CACHE": cache}
        two = timed([*lint, "--jobs", "2", str(TREE)], **own)
        again = timed([*lint, "--jobs", "2", str(TREE)], **own)
    what = f"{len(files)} files, {size / 1e6:.1f} MB"
    print(f"{what}: {two:.1f} s in 2 processes, {again:.1f} s cached")

    ratios, pairs = [], []
    for round_ in range(3):
        chosen = list(map(str, random.Random(round_).sample(files, count)))
        ours = timed([*lint, "--jobs", "1", "--no-cache", *chosen])
        theirs = timed([sys.executable, "-m", "torchfix", "--select", "ALL", *chosen])
        ratios.append(theirs / ours)
        pairs.append({"ampwise_s": round(ours, 2), "torchfix_s": round(theirs, 2)})
        print(f"{count} files: ampwise {ours:.2f} s, torchfix {theirs:.2f} s, {ratios[-1]:.1f}x")
    result = {
        "tree": {"files": len(files), "bytes": size, "two_processes_s": round(two, 1),
                 "cached_s": round(again, 1)},
        "torchfix": {"files": count, "pairs": pairs, "ratio": round(statistics.median(ratios), 1)},
    }  # fmt: skip
    save("lint", result)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
