"""What an interruption or an error leaves behind: what there was, and no empty folders."""

from __future__ import annotations

import json

import pytest

from ampwise.cli.main import main
from ampwise.numerics import diagnose
from ampwise.tune import run
from ampwise.tune.result import Tried, Tuned

TASK = """
import torch
from ampwise import Task
def task():
    return Task(name="mine", model=lambda: torch.nn.Linear(4, 2),
                batches=lambda: [torch.ones(4, 4)], loss=lambda m, x: m(x).float().mean())
"""


@pytest.fixture(autouse=True)
def _task(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)


def test_an_interrupted_diagnosis_says_how_far_it_came(monkeypatch, tmp_path, capsys):
    def interrupted(task, config, progress):
        progress.step(7, 50, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnose, "run_diagnosis", interrupted)
    assert main(["diagnose", "mine.py", "--quiet"]) == 130
    assert "what there was is in runs/diagnose-mine-1" in capsys.readouterr().err
    record = json.loads((tmp_path / "runs/diagnose-mine-1/run.json").read_text())
    assert (record["status"], record["steps"]) == ("interrupted", 7)
    assert main(["report", "runs/diagnose-mine-1"]) == 2
    assert "no finished diagnose run: it is interrupted after 7 steps" in capsys.readouterr().err


def test_an_interrupted_tune_keeps_what_it_found(monkeypatch, tmp_path, capsys):
    def one(task, policy, config):
        if policy.text == "fp16":
            raise KeyboardInterrupt
        return Tried("bf16", "bf16", reason="holds")

    monkeypatch.setattr(run, "make_hold", one)
    assert main(["tune", "mine.py", "--quiet"]) == 130
    assert "what there was is in runs/tune-mine-1" in capsys.readouterr().err
    stored = json.loads((tmp_path / "runs/tune-mine-1/tune.json").read_text())
    found = Tuned.from_json(stored)
    assert not found.finished
    assert [each.policy for each in found.tried] == ["bf16"]
    assert main(["report", "runs/tune-mine-1"]) == 0
    assert "Not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "mine.py", "--precisions", "fp32"],
        ["diagnose", "mine.py", "--precision", "bf16:islands=hed"],
        ["bench", "mine.py", "--metric", "acc", "--quiet"],
        ["verify", "mine.py", "--precision", "fp32", "--quiet"],
        ["train", "mine.py", "--precision", "bf16:islands=hed", "--quiet"],
    ],
    ids=lambda each: each[0],
)
def test_a_request_that_cannot_be_met_leaves_no_folder(tmp_path, arguments):
    assert main(arguments) == 2
    assert list((tmp_path / "runs").glob("*")) == []
    (tmp_path / "mine").mkdir()  # and the user's own stays
    assert main([*arguments, "--out", "mine"]) == 2
    assert list((tmp_path / "mine").glob("*")) == []


@pytest.mark.parametrize(("command", "resumes"), [("diagnose", False), ("train", True)])
def test_only_train_offers_to_resume(tmp_path, capsys, command, resumes):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    assert main([command, "mine.py", "--out", "old"]) == 2
    assert ("--resume continues it" in capsys.readouterr().err) == resumes
    assert (tmp_path / "old" / "run.json").exists()
