"""``--quiet`` hides progress, never a warning."""

from __future__ import annotations

import sys

import pytest

from ampwise.cli.main import main
from ampwise.policy import Policy, Resolution
from ampwise_lint.base.progress import Line

TASK = """
import torch
from ampwise import Task
def task():
    return Task(name="mine", model=lambda: torch.nn.Linear(4, 2),
                batches=lambda: [torch.ones(4, 4)] * 3, loss=lambda m, x: m(x).float().mean())
"""


@pytest.fixture(autouse=True)
def _task(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)


def test_a_tracker_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "ampwise.trackers.wandb_tracker", raising=False)
    given = ["--precision", "fp32", "--device", "cpu", "--track", "wandb"]
    assert main(["train", "mine.py", *given, "--quiet"]) == 0
    said = capsys.readouterr().err
    assert "tracker wandb is off, training goes on: not installed" in said
    assert "precision:" not in said


def test_another_precision_than_asked(monkeypatch, capsys):
    other = Resolution("fp16", Policy.parse("fp32"), "cpu", ("it is emulated",), changed=True)
    monkeypatch.setattr("ampwise.policy.resolve", lambda *_, **__: other)
    assert main(["train", "mine.py", "--precision", "fp16", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().err == f"precision: {other}\n"


def test_a_line_that_is_quiet_warns_and_one_that_is_mute_does_not(capsys):
    for line in (Line(quiet=True), Line(mute=True)):
        line.show("now", now=True)
        line.say("by the way")
        line.warn("mind this")
    assert capsys.readouterr().err == "mind this\n"
