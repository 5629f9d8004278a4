"""Processes of a test's own, which may hang, freeze or be killed; the test holds their store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.5

PROGRAM = """
import sys
import torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from tests.distributed import hanging

rank, port, what, limit_s, folder = sys.argv[1:]
rank, port, limit_s, folder = int(rank), int(port), float(limit_s), Path(folder)
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
group = dist.PrefixStore("group", store.clone())
dist.init_process_group("gloo", store=group, rank=rank, world_size=2)
hanging.main(what, limit_s, store, rank, folder)
"""


@dataclass
class Ended:
    """What became of a rank."""

    code: int | None
    err: str
    seconds: float
    words: str


class Two:
    """Two ranks of `hanging.main`."""

    def __init__(self, what: str, limit_s: float, folder: Path) -> None:
        self.folder = folder
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
        port = self.store.port
        self.processes: list[Any] = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, (rank, port, what, limit_s, folder))],
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            for rank in range(2)
        ]

    def wait_for(self, name: str) -> None:
        """Until a rank has written a file."""
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            for each in self.processes:
                assert each.poll() is None, each.communicate()[1]
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)

    def ended(self, rank: int, timeout: float = 90) -> Ended:
        """A rank's end; its output, and the seconds since now."""
        start = time.monotonic()
        _, err = self.processes[rank].communicate(timeout=timeout)
        words = self.folder / f"words-{rank}"
        return Ended(
            self.processes[rank].returncode,
            err,
            time.monotonic() - start,
            words.read_text() if words.exists() else "",
        )

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def close(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()
