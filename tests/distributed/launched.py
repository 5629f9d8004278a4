"""Commands under torchrun, as a user types them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def start(
    folder: Path,
    *arguments: str,
    launcher: tuple[str, ...] = ("--standalone", "--nproc-per-node=2"),
    variables: Mapping[str, str] = {},
) -> subprocess.Popen[str]:
    """Start ``torchrun -m ampwise ...`` in a folder."""
    path = f"{REPOSITORY / 'src'}:{folder}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "ampwise", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid in (*workers(process).values(), process.pid):
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not done after {seconds} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def run(folder: Path, *arguments: str, **settings: Any) -> tuple[int, str, str]:
    return finish(start(folder, *arguments, **settings))


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that a torchrun has started, by rank."""
    found: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        try:
            if parent(each) != process.pid:
                continue
            values = dict(
                item.split("=", 1)
                for item in (each / "environ").read_text().split("\0")
                if "=" in item
            )
        except OSError:
            continue
        if "RANK" in values:
            found[int(values["RANK"])] = int(each.name)
    return found


def parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
