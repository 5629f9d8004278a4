"""Trials in processes that have seen nothing of the user's, nor of one another."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from ampwise.numerics.remedy.fresh import LATE, Forked, Fresh, fresh, log_of
from ampwise.numerics.remedy.verify import CONTROL, Trials

CPU = torch.device("cpu")

MARKED = """
import sys
import torch

torch.been_here = getattr(torch, "been_here", 0) + 1
print("said aloud", file=sys.stderr)
raise RuntimeError(f"time {torch.been_here}")
"""
"""A task that can tell whether its process has loaded one before."""


@pytest.fixture(params=[Forked, Fresh])
def processes(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with request.param(tmp_path) as made:
        yield made


def write(folder: Path, text: str) -> None:
    """A task, and what a trial is told of it."""
    (folder / "task_of_mine.py").write_text(text)
    torch.save({"spec": "task_of_mine.py", "settings": {}}, folder / "step.pt")


def complaint(folder: Path, name: str) -> str:
    return json.loads((folder / f"{name}.json").read_text())["complaint"]


def test_no_trial_sees_another(processes, tmp_path):
    write(tmp_path, MARKED)
    for _ in range(2):
        assert processes.run(CONTROL, 100.0) == "0"
        assert complaint(tmp_path, CONTROL) == "no outcome: the task raises RuntimeError: time 1"
        assert log_of(tmp_path, CONTROL).read_text().startswith("said aloud")


def test_one_that_takes_too_long_is_ended_and_the_next_begins(processes, tmp_path):
    write(tmp_path, "import os, time\nfrom pathlib import Path\n"
                    "Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n")  # fmt: skip
    assert processes.run(CONTROL, 4.0) == LATE
    pid = tmp_path / "pid"
    if pid.exists():  # else it has not come so far
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    write(tmp_path, MARKED)
    assert processes.run(CONTROL, 100.0) == "0"


def test_how_a_process_ended_is_said(processes, tmp_path):
    write(tmp_path, "import os, sys\nprint('out of luck', file=sys.stderr, flush=True)\n"
                    "os.kill(os.getpid(), 9)\n")  # fmt: skip
    trials = Trials(tmp_path, tmp_path / "task_of_mine.py", processes, 1)
    assert trials.control() == "no outcome: the process ended with -9: out of luck"


def test_forks_are_made_where_they_are_safe(tmp_path, monkeypatch):
    with fresh(tmp_path, CPU) as processes:
        assert isinstance(processes, Forked)
    assert type(fresh(tmp_path, torch.device("cuda"))) is Fresh
    monkeypatch.setattr("sys.platform", "darwin")
    assert type(fresh(tmp_path, CPU)) is Fresh


def test_no_process_is_left(tmp_path):
    with Forked(tmp_path) as processes:
        pid = processes._parent.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_process_that_could_not_import_is_an_outcome(tmp_path):
    with Forked(tmp_path) as processes:
        os.killpg(processes._parent.pid, signal.SIGKILL)
        time.sleep(0.1)
        trials = Trials(tmp_path, tmp_path / "task.py", processes, 1)
        assert trials.control().startswith("no outcome: the process ended with -9")
