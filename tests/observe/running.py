"""Scripts as processes, by themselves and under `ampwise run`.

A command is a fork of a process that has imported torch, but where a test is about how Python
itself begins and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.forked import Python

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LIMIT_S = 200


@dataclass
class Ran:
    """How a process ended, and what it left."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        """What stands in ``steps.jsonl``."""
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]


QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
"""One thread, and nothing that goes to a network."""


def _fresh(arguments: list[str], cwd: Path) -> Ran:
    """A Python that starts with these arguments, at its end."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env={**os.environ, **QUIET}, text=True, timeout=LIMIT_S, check=False,
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    return _left(cwd, done.returncode, done.stdout, done.stderr)


def _left(cwd: Path, code: int, out: str, err: str) -> Ran:
    stored = cwd / "report.json"
    report = json.loads(stored.read_text()) if stored.exists() else {}
    return Ran(code, out, err, report, cwd / "observed")


def start(arguments: list[str], cwd: Path) -> Python:
    """A fork that does what Python does with these arguments."""
    return Python(arguments, cwd, QUIET)


def ended(process: Python, cwd: Path) -> Ran:
    """A fork at its end; killed if there is none."""
    return _left(cwd, *process.ended(LIMIT_S))


def by_itself(
    script: list[str], cwd: Path, launcher: tuple[str, ...] = (), *, forked: bool = False
) -> Ran:
    """Run a script with its arguments, or ``-m`` and a module, as users do.

    `forked` is for what it computes: how Python shows its errors and ends is told by Python itself.
    """
    if forked and not launcher:
        return ended(start(script, cwd), cwd)
    return _unless_torch_aborts([*launcher, *script], cwd)


def observed(
    script: list[str],
    cwd: Path,
    options: list[str] | None = None,
    launcher: tuple[str, ...] = (),
    *,
    fresh: bool = False,
) -> Ran:
    """Run a script under observation; in a Python of its own with a launcher, or if `fresh`."""
    own = ["--out", "observed", "--json", "report.json", *(options or [])]
    command = ["-m", "ampwise", "run", *own, *script]
    if launcher or fresh:
        return _unless_torch_aborts([*launcher, *command], cwd)
    return ended(start(command, cwd), cwd)


def _unless_torch_aborts(arguments: list[str], cwd: Path) -> Ran:
    """Run it; again where a rank was aborted at its exit, as gloo's threads do now and then.

    That happens without ampwise, too (docs/log.md, 2026-11-22).
    """
    for _ in range(3):
        ran = _fresh(arguments, cwd)
        if "exitcode: -6" not in ran.err:
            break
        shutil.rmtree(ran.folder, ignore_errors=True)
    return ran


def planted(script: Path, what: str) -> int:
    """The line of a script that a mistake stands in."""
    lines = script.read_text().splitlines()
    (found,) = [at for at, line in enumerate(lines, 1) if f"# PLANTED {what}" in line]
    return found


def differences(one: Path, other: Path) -> Iterator[str]:
    """What two scripts' dumps disagree in: losses of all steps and the model's state, to the bit."""
    first, second = torch.load(one), torch.load(other)
    for index, (mine, yours) in enumerate(zip(first["losses"], second["losses"], strict=True)):
        if not _same(torch.tensor(mine), torch.tensor(yours)):
            yield f"loss {index}: {mine!r} and {yours!r}"
    assert list(first["model"]) == list(second["model"])
    for name, value in first["model"].items():
        if not _same(value, second["model"][name]):
            yield name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)
    )
