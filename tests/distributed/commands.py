"""Commands on some ranks, told who they are as torchrun tells them, without its start-up."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked import fork, into


class Command:
    """``ampwise ...`` on one or more ranks, in a folder.

    Attributes
    ----------
    processes
        The ranks.
    """

    def __init__(self, folder: Path, *arguments: str, ranks: int = 2) -> None:
        self._said = folder / f"said-{len(list(folder.glob('said-*')))}"
        self._said.mkdir()
        # As torchrun's agent does, the test keeps the store for as long as the ranks need it.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.processes: list[Any] = [
            fork(_command, folder, self._said, arguments, _told(rank, ranks, self._store.port))
            for rank in range(ranks)
        ]

    @property
    def out(self) -> str:
        """What the ranks have written to standard output so far, one after the other."""
        return self._all("out")

    @property
    def err(self) -> str:
        """The same of standard error."""
        return self._all("err")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for each in self.processes:
            os.kill(each.pid, number)

    def finish(self, seconds: float = 90) -> list[int]:
        """Exit codes."""
        for each in self.processes:
            each.join(seconds)
        codes = [each.exitcode for each in self.processes]
        for each in self.processes:
            each.kill()
        assert None not in codes, f"not done after {seconds} s:\n{self.out}\n{self.err}"
        return codes

    def _all(self, stream: str) -> str:
        return "".join(each.read_text() for each in sorted(self._said.glob(f"{stream}-*")))


def _told(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables; none for a process that is alone."""
    if ranks == 1:
        return {}
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    words = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return words | {name: str(number) for name, number in numbers.items()}


def _command(
    folder: Path, said: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    from ampwise.cli.main import main

    rank = variables.get("RANK", "0")
    into(said / f"out-{rank}", said / f"err-{rank}")
    os.chdir(folder)
    os.environ |= variables
    sys.path.insert(0, str(folder))
    sys.exit(main(arguments))
