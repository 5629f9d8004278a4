"""Errors under torchrun: what all ranks have alike is said once, what one rank has with its number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from ampwise.cli.main import main
from ampwise.distributed.launch import Launch, _first_has
from tests.distributed.commands import Command
from tests.distributed.launched import run

TASK = """
import os, resource, torch
from ampwise import Task

if os.environ.get("RANK") == os.environ.get("BROKEN"):
    raise ImportError("no such library here")

def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return Task(lambda: torch.nn.Linear(8, 9000), lambda: [torch.ones(2, 8)] * 2,
                lambda model, batch: model(batch).square().mean(), name="full")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def _said(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("ampwise: ")]


@pytest.mark.parametrize("command", ["train", "diagnose"])
def test_a_wrong_task_is_said_once(folder: Path, command: str) -> None:
    ranks = Command(folder, command, "mine.py:ful")
    assert ranks.finish() == [2, 2]
    assert len(_said(ranks.err)) == 1, ranks.err
    assert "error: task 'mine.py:ful': there is no function 'ful' in mine.py" in _said(ranks.err)[0]


def test_a_full_disk_is_said_once(folder: Path) -> None:
    ranks = Command(folder, "train", "mine.py:full", "--precision", "fp32", "--out", "run")
    assert all(ranks.finish())
    assert ranks.err.count("error: cannot write checkpoint") == 1, ranks.err


@pytest.mark.slow
def test_an_error_of_one_rank_has_its_number(folder: Path) -> None:
    code, _, err = run(folder, "train", "mine.py:full", variables={"BROKEN": "1"})
    assert code
    assert err.count("ImportError: no such library here") == 1, err
    assert "ampwise: error: rank 1: importing mine.py raised ImportError" in err


def test_the_first_process_speaks_for_those_with_the_same_words() -> None:
    store = dist.HashStore()
    first, second = Launch(rank=0, size=2), Launch(rank=1, size=2)
    assert not _first_has(store, first, "ValueError: x")
    assert _first_has(store, second, "ValueError: x")
    assert not _first_has(store, second, "ValueError: y")


def test_before_they_meet_one_process_a_machine_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "--stepz", "3"]) == 2
    assert "unknown option --stepz" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--stepz", "3"]) == 2
    assert capsys.readouterr().err == ""
