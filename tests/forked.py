"""Processes forked off one that has imported everything: they begin at once.

A fresh interpreter takes ten seconds on two cores until its first step on several ranks, nearly all
of it imports. So a server (multiprocessing's own) imports once, and each rank of a test is a fork of
it; so is a script that is run as `Python` runs it, where how Python itself begins is not what is
tested.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "ampwise.bench.scaling",
        "ampwise.cli.bench",
        "ampwise.cli.diagnose",
        "ampwise.cli.run",
        "ampwise.cli.train",
        "ampwise.numerics.on_fault",
        "ampwise.observe.run",
        "ampwise.report.page",
        "ampwise.report.run",
        "ampwise.report.scaling",
        "ampwise.report.train",
        "ampwise.training.loop",
        "libcst.codemod",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "pytest",
        "sklearn.datasets",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ]
)


def fork(function: Callable[..., object], *args: Any) -> Any:
    """A process that calls a module-level function; it ends with the one that asked for it."""
    process = _SERVER.Process(target=_alone, args=(function, args), daemon=True)
    process.start()
    return process


def _alone(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    function(*args)


def into(out: Path, err: Path) -> None:
    """Write what this process says to files."""
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, stream.fileno())
        os.close(opened)


class Python:
    """A fork that does what ``python SCRIPT ...`` or ``python -m MODULE ...`` does in a folder."""

    def __init__(self, words: Sequence[str], cwd: Path, variables: Mapping[str, str] = {}) -> None:
        self._kept = TemporaryDirectory()
        self._out, self._err = (Path(self._kept.name) / each for each in ("out", "err"))
        environment = {**os.environ, **variables}
        self._process = fork(_as_python, list(words), cwd, environment, self._out, self._err)

    def wait_for(self, text: str, seconds: float = 90) -> None:
        """Until it has written this to its standard output."""
        deadline = time.monotonic() + seconds
        while not (self._out.exists() and text in self._out.read_text()):
            assert self._process.is_alive(), self._err.read_text()
            assert time.monotonic() < deadline, f"it did not say {text!r}"
            time.sleep(0.01)

    def alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def ended(self, seconds: float = 200) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; killed if there is no end."""
        self._process.join(seconds)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        out, err = self._out.read_text(), self._err.read_text()
        self._kept.cleanup()
        assert code is not None, f"not done after {seconds:.0f} s:\n{out}\n{err}"
        return code, out, err


def _as_python(
    words: list[str], cwd: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    into(out, err)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children, as any
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["__main__"] = ModuleType("__main__")
    is_module = words[0] == "-m"
    sys.argv, sys.orig_argv = words[is_module:], [sys.executable, *words]
    sys.path.insert(0, str(cwd if is_module else Path(words[0]).resolve().parent))
    try:
        if is_module:
            vars(runpy)["_run_module_as_main"](words[1])  # what ``python -m`` calls
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
