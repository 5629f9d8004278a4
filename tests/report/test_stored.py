"""A run of each kind, read back from its folder and shown in every form."""

from __future__ import annotations

import json
import math

import pytest

from ampwise.cli.main import main
from ampwise.report.diagnosis import to_html as diagnosis_html
from ampwise.report.diagnosis import to_markdown as diagnosis_markdown
from ampwise.report.stored import load
from ampwise.report.train import TrainedRun, to_html, to_markdown
from ampwise.report.verify import to_html as verify_html
from ampwise.verify.result import Finding, Verification
from tests.report.test_report import HOSTILE, Page


@pytest.fixture
def trained(tmp_path):
    folder = tmp_path / "trained"
    arguments = ["train", "digits", "--precision", "fp16", "--allow-emulated", "--steps", "4"]
    assert main([*arguments, "--quiet", "--out", str(folder)]) == 0
    return folder


def test_a_trained_run_leaves_a_page_and_shows_again(trained, capsys):
    page = (trained / "report.html").read_text()
    assert "digits in fp16" in page
    assert len(Page(page).labels) == 3  # loss, loss scale, grad norm
    assert main(["report", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "digits in fp16: finished" in shown
    assert str(trained) in shown.replace("\n", "").replace(" ", "")
    assert main(["report", str(trained), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in told["steps"] if "train/loss" in each] == [1, 2, 3, 4]
    assert main(["report", str(trained), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == to_markdown(TrainedRun.load(trained))
    assert main(["report", str(trained), "--format", "html"]) == 0
    assert (trained / "report.html").read_text() == page
    assert main(["report", str(trained), "--gate"]) == 2
    assert "no requirements" in capsys.readouterr().err


def test_settings_of_a_run_are_named_with_its_optimizer_and_what_was_changed(trained):
    record = json.loads((trained / "run.json").read_text())
    record["config"]["changes"] = ["changed at step 2: seed: 0 in the checkpoint, 1 now", "more"]
    (trained / "run.json").write_text(json.dumps(record))
    page = to_html(TrainedRun.load(trained))
    assert "<dt>optimizer</dt><dd>AdamW</dd>" in page
    assert "<dt>parameter group 1, weight_decay</dt>" in page
    assert "<dd>changed at step 2: seed: 0 in the checkpoint, 1 now; more</dd>" in page
    assert page.count("held_out") == 1


def test_skipped_steps_are_in_the_figure_and_a_torn_run_is_one_line(trained, capsys):
    run = TrainedRun.load(trained)
    assert "skipped (" not in to_html(run)
    run.steps[1].update({"amp/found_inf": True, "train/loss": "nan", "amp/grad_norm": "inf"})
    assert "skipped (1)" in to_html(run)
    run.result.loss = math.nan
    run.steps = []
    assert "<svg" not in to_html(run)
    (trained / "run.json").write_text('{"command": "train", "result": {"task": "x"}}')
    assert main(["report", str(trained)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "run.json: result.schema: expected ampwise.train/1, got null" in said


def verification(task: str = "small") -> Verification:
    return Verification(
        task, "cpu", "bf16", "fp16", {"device_name": "a", "architecture": "b", "threads": 1,
                                      "torch": "2", "ampwise": "0"},
        [
            Finding("loss_scale", "loss scaling", "one overflow", "pass", "halved", critical=True),
            Finding("speedup", "speed", "bench", "not measured", "left out", critical=False),
        ],
    )  # fmt: skip


def test_a_verification_shows_again_and_keeps_its_gate(tmp_path, capsys):
    folder = tmp_path / "verified"
    folder.mkdir()
    (folder / "verify.json").write_text(json.dumps(verification().to_json()))
    assert load(folder) == verification()
    assert main(["report", str(folder), "--gate"]) == 0
    assert "PASS: 1 of 2" in capsys.readouterr().out
    assert main(["report", str(folder), "--gate", "strict"]) == 1
    assert main(["report", str(folder), "--format", "html"]) == 0
    rows = Page((folder / "report.html").read_text()).tables["requirements"]
    assert [row[2] for row in rows[1:]] == ["pass", "not measured"]
    assert main(["report", str(folder), str(folder)]) == 2
    assert "expected two bench runs" in capsys.readouterr().err


@pytest.fixture
def diagnosed(tmp_path):
    folder = tmp_path / "diagnosed"
    (tmp_path / "scores.py").write_text(
        "from tests.numerics.cases import CASES\ntask = CASES['scores before scaling'].make\n"
    )
    assert main(["diagnose", str(tmp_path / "scores.py"), "--quiet", "--out", str(folder)]) == 1
    return folder


def test_a_diagnosis_shows_again_in_every_form(diagnosed, capsys):
    found = load(diagnosed)
    page = (diagnosed / "report.html").read_text()
    rows = Page(page).tables["tensors"]
    assert [row[0] for row in rows[1:]] == ["self", "mat2", "result"]
    assert rows[3][-1] == "100.0%"
    assert "q @ k.transpose(-1, -2)" in page
    assert Page(page).headings[0] == 1
    assert main(["report", str(diagnosed), "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "RANGE\\_OVERFLOW at step 1" in text
    shown = text.count("| verified |") + text.count("| holds on this step |")
    assert shown == sum(each.verified for each in found.fixes)
    assert main(["report", str(diagnosed), "--gate"]) == 1
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert main(["report", str(diagnosed), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (diagnosed / "diagnosis.json").read_text()
    )


def test_a_search_shows_again_in_every_form(tmp_path, capsys):
    folder = tmp_path / "tuned"
    arguments = ["tune", "digits", "--precisions", "bf16", "--no-bench", "--steps", "2"]
    assert main([*arguments, "--quiet", "--out", str(folder)]) == 0
    capsys.readouterr()
    for form, wanted in (("terminal", "These hold: bf16."), ("markdown", "| bf16 | bf16 |")):
        assert main(["report", str(folder), "--format", form]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["report", str(folder), "--format", "json"]) == 0
    assert capsys.readouterr().out == (folder / "tune.json").read_text()
    page = (folder / "report.html").read_text()
    assert Page(page).tables["tried"][1][:2] == ["bf16", "bf16"]
    assert main(["report", str(folder), "--format", "html"]) == 0
    assert (folder / "report.html").read_text() == page
    assert main(["report", str(folder), "--gate"]) == 2
    (folder / "tune.json").write_text('{"schema": "ampwise.tune/1", "tried": []}')
    assert main(["report", str(folder)]) == 2
    assert "tune.json: task: expected a value, got nothing" in capsys.readouterr().err


def test_out_takes_what_the_terminal_would_show(tmp_path, capsys):
    folder = tmp_path / "verified"
    folder.mkdir()
    (folder / "verify.json").write_text(json.dumps(verification().to_json()))
    assert main(["report", str(folder), "--out", "told.txt"]) == 0
    assert capsys.readouterr().out == "wrote told.txt\n"
    told = (tmp_path / "told.txt").read_text()
    assert "PASS: 1 of 2" in told
    assert "\x1b" not in told


def test_hostile_names_stay_text(trained, diagnosed):
    run = TrainedRun.load(trained)
    run.result.task = HOSTILE
    found = load(diagnosed)
    found.task = found.explanation = HOSTILE
    found.path = [HOSTILE, HOSTILE]
    found.histograms = {HOSTILE: {"0": 1.0}}
    assert "<script>" not in diagnosis_markdown(found).replace("\\<", "")
    for page in (to_html(run), verify_html(verification(HOSTILE)), diagnosis_html(found)):
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
