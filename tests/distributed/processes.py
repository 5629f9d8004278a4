"""Processes of a test's own, which may hang, freeze or be killed; the test holds their store."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked import fork, into

LIMIT_S = 2.5


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
        self.processes: list[Any] = [
            fork(_run, what, limit_s, self.store.port, rank, folder) for rank in range(2)
        ]

    def wait_for(self, name: str) -> None:
        """Until a rank has written a file."""
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            for rank, each in enumerate(self.processes):
                assert each.is_alive(), self._err(rank)
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)

    def ended(self, rank: int, timeout: float = 90) -> Ended:
        """A rank's end; its output, and the seconds since now."""
        start = time.monotonic()
        self.processes[rank].join(timeout)
        words = self.folder / f"words-{rank}"
        return Ended(
            self.processes[rank].exitcode,
            self._err(rank),
            time.monotonic() - start,
            words.read_text() if words.exists() else "",
        )

    def _err(self, rank: int) -> str:
        return (self.folder / f"err-{rank}").read_text()

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def close(self) -> None:
        for each in self.processes:
            each.kill()
            each.join()


def _run(what: str, limit_s: float, port: int, rank: int, folder: Path) -> None:
    from tests.distributed import hanging

    into(folder / f"out-{rank}", folder / f"err-{rank}")
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    group = dist.PrefixStore("group", store.clone())
    dist.init_process_group("gloo", store=group, rank=rank, world_size=2)
    hanging.main(what, limit_s, store, rank, folder)
