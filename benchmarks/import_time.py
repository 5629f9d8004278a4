"""Figure 5: what ``import ampwise`` adds to ``import torch``, and how fast ``ampwise --help`` is.

Every sample is a fresh process; the arms take turns. What an import adds is timed inside the
process, after ``import torch``, whose own seconds would drown it. ``import ampwise`` loads its
names when first used, so the arm with names is the honest one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from _common import save

TIMED = """
import time
{before}
start = time.perf_counter()
{timed}
print((time.perf_counter() - start) * 1e3)
"""
IMPORTS = {
    "import torch": ("", "import torch"),
    "torch there, import ampwise": ("import torch", "import ampwise"),
    "torch there, ampwise with TrainStep, resolve, Task": (
        "import torch",
        "import ampwise; ampwise.TrainStep, ampwise.resolve, ampwise.Task",
    ),
}
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "ampwise --help": ["-m", "ampwise", "--help"],
    "ampwise bench --help": ["-m", "ampwise", "bench", "--help"],
}
# As an installed package: byte code is written once, and read from then on.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def import_ms(before: str, timed: str) -> float:
    """Milliseconds of an import, timed by the process that does it."""
    return float(python("-c", TIMED.format(before=before, timed=timed)))


def command_ms(arguments: list[str]) -> float:
    """Wall-clock milliseconds of a process from start to end."""
    start = time.perf_counter()
    python(*arguments)
    return (time.perf_counter() - start) * 1e3


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, env=ENVIRONMENT
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    samples: dict[str, list[float]] = {name: [] for name in (*IMPORTS, *COMMANDS)}
    for _ in range(rounds + 1):
        for name, (before, timed) in IMPORTS.items():
            samples[name].append(import_ms(before, timed))
        for name, arguments in COMMANDS.items():
            samples[name].append(command_ms(arguments))

    arms = {}
    for name, [_, *times] in samples.items():  # the first round fills the caches
        low, median, high = statistics.quantiles(times, n=4)
        arms[name] = {"median_ms": median, "quartiles_ms": [low, high], "highest_ms": max(times)}
        print(f"{name:52s} {median:7.0f} ms [{low:.0f}, {high:.0f}]")
    save("import-time", {"rounds": rounds, "arms": arms})


if __name__ == "__main__":
    main()
