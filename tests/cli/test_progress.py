"""A line of progress fits, and says only what is known."""

from __future__ import annotations

import time

import pytest

from ampwise.bench.race import Race
from ampwise.cli import progress
from ampwise.cli.progress import BenchProgress, TrainProgress
from ampwise.step import StepRecord
from ampwise_lint.base.progress import Line

NAMES = ("fp32", "fp32 again", "tf32", "fp16", "bf16", "bf16-master", "bf16-pure", "fp8")


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.5, loss_scale=1.0, grad_norm=1.0, found_inf=False, lr=0.1, skipped=False,
        skipped_total=0, scale_growths=0, scale_backoffs=0,
    )  # fmt: skip


def test_a_rate_that_is_not_known_is_not_said(capsys):
    shown = TrainProgress(Line())
    shown.step(record(1), 0.0, 10)
    assert "samples/s" not in capsys.readouterr().err
    shown._line._last = 0.0
    shown.step(record(2), 12.0, 10)
    assert "12 samples/s" in capsys.readouterr().err


def race(names) -> Race:
    now = time.monotonic()
    return Race({name: [1.0] * 120 for name in names}, baseline=names[0], planned=200,
                started=now - 9, deadline=now + 60)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 300])
def test_a_race_is_not_cut_in_the_middle_of_a_figure(monkeypatch, capsys, width):
    monkeypatch.setattr("ampwise_lint.base.progress._columns", lambda: width)
    line = Line()
    line._terminal = True
    shown = BenchProgress(line)
    shown.stage("race")
    capsys.readouterr()
    line._last = 0.0
    shown.round(race(NAMES))
    said = capsys.readouterr().err.strip("\r ")
    assert len(said) <= width - 1
    assert said.startswith("race 120/200, ")
    figures = {f"{name} 1.00x" for name in NAMES[2:]}
    rest = said.split(", ")[1:]
    assert rest.pop(0).endswith(" s left")
    assert any(each.endswith(" rounds/s") for each in rest) == (width == 300)
    assert set(rest[:-1] if width == 300 else rest) <= figures


def test_the_usual_precisions_fit_into_80_columns():
    parts = ["race 120/200", "123 s left", *progress._ratios(race(NAMES[:-2])), "13.3 rounds/s"]
    assert progress._fitted(parts, 79).endswith("bf16-master 1.00x")


def test_without_a_control_every_arm_beside_the_baseline_is_shown():
    assert progress._ratios(race(("bf16", "bf16 + compile"))) == ["bf16 + compile 1.00x"]


def test_a_message_ends_its_lines_between_words_on_a_terminal(monkeypatch, capsys):
    text = "precision: bf16 on cpu: no accelerator is present; bfloat16 matmul is native, 7.0x"
    line = Line()
    line.say(text)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr("ampwise_lint.base.progress._columns", lambda: 30)
    line._terminal = True
    line.say(text)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= 30
