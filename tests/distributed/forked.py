"""Processes forked off one that has imported everything: they begin at once.

A fresh interpreter takes ten seconds on two cores until its first step on several ranks, nearly all
of it imports. So a server (multiprocessing's own) imports once, and each rank of a test is a fork of
it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "ampwise.bench.scaling",
        "ampwise.cli.bench",
        "ampwise.cli.diagnose",
        "ampwise.cli.train",
        "ampwise.numerics.on_fault",
        "ampwise.report.page",
        "ampwise.report.scaling",
        "ampwise.report.train",
        "ampwise.training.loop",
        "matplotlib.figure",
        "pytest",
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
