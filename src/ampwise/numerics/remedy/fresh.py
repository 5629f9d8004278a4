"""Fresh processes for trials: none has seen a module of the user's, nor another trial.

To import PyTorch and ampwise takes longer than most trials. So one process does that, while the
step is still being handed over, and is forked for each trial (`Forked`). It computes nothing by
itself, so it has no threads that a fork would lose. Elsewhere than on Linux forks are not safe, and
an accelerator cannot be used in a fork of a process that has asked for it: there each process
starts from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

import ampwise

LATE = "late"
"""The answer for a process that did not end in time."""


def fresh(folder: Path, device: torch.device) -> Fresh:
    """Processes for trials of a step on a device, that are in a folder."""
    return Forked(folder) if sys.platform == "linux" and device.type == "cpu" else Fresh(folder)


def log_of(folder: Path, name: str) -> Path:
    """Where a trial's output goes."""
    return folder / f"{name}.log"


class Fresh:
    """A process for each trial, started from nothing; a context, which leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """None is left."""

    def run(self, name: str, within_s: float) -> str:
        """Make a trial: the exit code of its process, or `LATE`."""
        with log_of(self._folder, name).open("wb") as log:
            try:
                done = subprocess.run(  # noqa: S603 - our own module
                    _command(self._folder, name), env=_environment(), stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, check=False, timeout=within_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return LATE
        return str(done.returncode)


class Forked(Fresh):
    """Forks of one process (`serve`), which begins to import at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._log = log_of(folder, "imports").open("wb")
        self._parent = subprocess.Popen(  # noqa: S603 - our own module
            _command(folder), env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, name: str, within_s: float) -> str:
        """Make a trial."""
        parent = self._parent
        assert parent.stdin is not None
        assert parent.stdout is not None
        with suppress(BrokenPipeError):  # it is over: then it does not answer
            print(name, within_s, file=parent.stdin, flush=True)
        return parent.stdout.readline().strip() or str(parent.wait())

    def __exit__(self, *_: object) -> None:
        """End the process, and a trial that has not ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.communicate()
        self._log.close()


def serve(folder: Path, requests: Iterable[str], trial: Callable[[Path, str], None]) -> None:
    """Make each trial that is asked for in a fork of this process, and print how it ended.

    Parameters
    ----------
    requests
        Lines with a name, and the seconds that the trial may take.
    """
    # An optimizer imports PyTorch's compiler, which takes as long as all the rest.
    torch.optim.SGD([torch.zeros(1)])
    forks = multiprocessing.get_context("fork")
    for each in requests:
        name, within_s = each.split()
        process = forks.Process(target=_apart, args=(folder, name, trial))
        process.start()
        process.join(float(within_s))
        ended = LATE if process.exitcode is None else str(process.exitcode)
        process.kill()
        process.join()
        sys.stdout.write(f"{ended}\n")
        sys.stdout.flush()


def _apart(folder: Path, name: str, trial: Callable[[Path, str], None]) -> None:
    """A trial whose output goes to its log."""
    with log_of(folder, name).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    trial(folder, name)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ampwise.numerics.remedy.trial", *map(str, arguments)]


def _environment() -> dict[str, str]:
    """That of this process, and where ampwise is imported from."""
    home = str(Path(ampwise.__file__).parent.parent)
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path}
