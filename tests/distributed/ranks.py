"""Two real processes with a gloo group, kept between tests: a test hands them a function to run.

The functions are module-level functions of the tests; each rank runs them and hands back what they
return. Ranks that do not answer in time are killed, and a fresh pair serves the next test.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forked import fork

SIZE = 2
SECONDS = 60.0


class Ranks:
    """A group of processes."""

    def __init__(self, size: int = SIZE) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = Pipe()
            self.processes.append(fork(_serve, there, rank, size, store))
            self._pipes.append(here)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function returns on each rank; the first error on any of them is raised."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} did not answer in {SECONDS:.0f} s")
            error, answer = pipe.recv()
            if error:
                self.close()  # the others may wait for it for ever
                raise AssertionError(f"rank {rank}:\n{error}")
            answers.append(answer)
        return answers

    @property
    def alive(self) -> bool:
        return all(each.is_alive() for each in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("", function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


_kept: list[Ranks] = []


def pair() -> Ranks:
    """Two processes that belong together; the same ones as long as they live."""
    if not _kept or not _kept[0].alive:
        _kept[:] = [Ranks()]
    return _kept[0]


def close_all() -> None:
    while _kept:
        _kept.pop().close()
