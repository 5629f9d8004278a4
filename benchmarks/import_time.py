"""Figure 5: what ``import ampwise`` adds to ``import torch``, and how fast ``ampwise --help`` is.

Every sample is a fresh process; the arms take turns. The first line loads the package and the
public names that one trains with, because ``import ampwise`` alone loads nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from _common import save

ARMS = {
    "import torch": ["-c", "import torch"],
    "import torch, ampwise": ["-c", "import torch, ampwise"],
    "import torch, ampwise.TrainStep, resolve, Task": [
        "-c",
        "import torch, ampwise; ampwise.TrainStep, ampwise.resolve, ampwise.Task",
    ],
    "python": ["-c", "pass"],
    "ampwise --help": ["-m", "ampwise", "--help"],
    "ampwise bench --help": ["-m", "ampwise", "bench", "--help"],
}


def once(arguments: list[str]) -> float:
    """Wall-clock milliseconds of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    for arguments in ARMS.values():
        once(arguments)  # fills the file cache and writes the byte code
    samples: dict[str, list[float]] = {name: [] for name in ARMS}
    for number in range(rounds):
        order = list(ARMS.items())
        for name, arguments in order if number % 2 else reversed(order):
            samples[name].append(once(arguments))

    torch_ms = samples["import torch"]
    results = {}
    for name, times in samples.items():
        added = [a - b for a, b in zip(times, torch_ms, strict=True)]
        results[name] = {"median_ms": statistics.median(times), "quartiles_ms": quartiles(times)}
        line = f"{name:48s} {statistics.median(times):7.0f} ms {shown(quartiles(times))}"
        if name.startswith("import torch,"):
            results[name] |= {
                "added_ms": statistics.median(added),
                "added_quartiles_ms": quartiles(added),
            }
            line += f"   adds {statistics.median(added):.0f} ms {shown(quartiles(added))}"
        print(line)
    save("import-time", {"rounds": rounds, "arms": results})


def quartiles(values: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def shown(pair: list[float]) -> str:
    return f"[{pair[0]:.0f}, {pair[1]:.0f}]"


if __name__ == "__main__":
    main()
