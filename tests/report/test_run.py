"""What `ampwise run` saw, in words and forms."""

from __future__ import annotations

import io
import json

import pytest

from ampwise.cli.main import main
from ampwise.lines import place
from ampwise.numerics.result import Diagnosis, Fix, Origin
from ampwise.observe.result import Asked, Finding, Overhead, Raced, Ran, RunReport, Skip
from ampwise.report.observed import ObservedRun
from ampwise.report.run import render, to_html, to_markdown
from ampwise_lint.base.console import Console
from tests.report.observed import observed, precision
from tests.report.test_report import Page
from tests.test_neutral import HOSTILE, harmless

STEPS = [
    {"step": n, "train/loss": 2.0 / n, "amp/loss_scale": 2.0**n, "amp/grad_norm": 0.5,
     "train/step_s": 0.2, "train/data_wait_s": 0.05}
    for n in range(1, 6)
]  # fmt: skip
FAULT = Diagnosis(
    "fault", "train.py", "fp16", "cpu", 12, "forward",
    Origin("bmm", "attn", "model.py", 89, "q @ k.t()", "float16"), "RANGE_OVERFLOW",
    "The result would be 102,400.",
    [Fix("line 89 in float32", "autocast off there", True, "1.10x"),
     Fix("clamp", "clamp q", False, "not finite")],
)  # fmt: skip


def shown(run: ObservedRun, width: int = 80) -> str:
    paper = io.StringIO()
    render(run, Console(file=paper, width=width))
    return harmless(paper.getvalue())


def clean() -> ObservedRun:
    ran = Ran({"bfloat16": 2}, {"bfloat16": 3})
    return ObservedRun(
        RunReport("train.py", steps=48, optimizers=["AdamW"], ending="finished", loss_first=2.3,
                  loss_last=2.1, step_ms=1.5, overhead=Overhead(0.1, 0.01, 0.0067),
                  precision=precision(ran=ran, exceptions=[]))
    )  # fmt: skip


def rows(**changes) -> dict[str, str]:
    return dict(ObservedRun(observed(**changes)).rows)


def test_a_clean_run_is_said_in_ten_lines():
    text = shown(clean())
    lines = text.strip().splitlines()
    assert lines[0] == "Every matrix product ran in bfloat16, as asked (train.py:12)"
    assert lines[1] == "train.py finished after 48 steps; AdamW"
    assert lines[-1] == "No fault and no mistake was seen."
    assert "observing took 0.01 ms a step, 0.7% of it" in text
    assert len(lines) <= 10
    assert clean().standing == "pass"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "30 of 42 matrix products ran in bfloat16, as asked (train.py:12)"),
        ({"active": False, "ran": Ran({"float32": 2}, {"float32": 3})},
         "Precision asked for, but not active: bfloat16 was asked for (train.py:12), every matrix "
         "product ran in float32"),
        ({"active": False, "ran": Ran({"float32": 3, "bfloat16": 2})},
         "Precision asked for, but not active: bfloat16 was asked for (train.py:12), 3 of 5 matrix "
         "products ran in float32"),
        ({"active": False, "ran": Ran(), "asked": [Asked("float16", "", 0)]},
         "Precision asked for, but not active: float16 was asked for, no autocast region was on"),
        ({"asked": [], "ran": Ran({"float32": 5})},
         "Every matrix product ran in float32, and nothing less was asked for"),
        ({"asked": [], "ran": Ran({"bfloat16": 5})},
         "Every matrix product ran in bfloat16, cast by hand"),
        ({"ran": Ran()}, "Bfloat16 was asked for (train.py:12); what ran in it was not seen"),
        ({"asked": [], "ran": Ran()},
         "Nothing but float32 was asked for; what ran in it was not seen"),
        ({"asked": [Asked("bfloat16", f"{n}.py", n) for n in range(8)], "ran": Ran({"bfloat16": 1})},
         "Every matrix product ran in bfloat16, as asked (0.py:0, 1.py:1, 2.py:2, 3.py:3, 4.py:4 and "
         "3 more)"),
    ],
)  # fmt: skip
def test_what_ran_is_the_first_thing_said(changes, said):
    run = ObservedRun(observed(precision=precision(**changes)))
    assert run.headline == said
    assert " ".join(shown(run).split()).startswith(said)
    assert Page(to_html(run)).headings[0] == 1
    assert said in to_html(run)


def test_products_in_another_dtype_are_named_by_line():
    assert ObservedRun(observed()).exceptions == [
        "12 in float32: scaled_dot_product_attention, bmm, blocks.0, model.py:41"
    ]


def test_a_script_without_steps_says_how_it_ended():
    run = ObservedRun(RunReport("train.py", 1, ending="raised ValueError"))
    assert shown(run).strip() == "No step of an optimizer was seen: train.py raised ValueError"
    assert run.standing == "fail"


def test_a_fault_has_its_line_and_best_fix_on_a_terminal_and_all_of_them_on_the_page():
    run = ObservedRun(observed(faults=[FAULT]))
    text = shown(run)
    assert "RANGE_OVERFLOW at step 12, forward: bmm in attn, line 89" in text
    assert "model.py:89" in text
    assert "holds on this step: line 89 in float32 (1.10x)" in text
    assert "clamp" not in text
    assert [row[1] for row in Page(to_html(run)).tables["fixes-1"][1:]] == [
        "holds on this step",
        "not verified",
    ]
    assert "| clamp | clamp q | not verified |" in to_markdown(run)
    assert run.standing == "fail"


def test_findings_have_line_code_times_and_what_was_seen():
    findings = [Finding(f"AMP10{n}", "info", "a.py", n, "wrong", times=n) for n in range(1, 7)]
    findings[0] = Finding("AMP101", "error", "a.py", 1, "clipped", "loss scale 8", 1200)
    run = ObservedRun(observed(findings=findings))
    text = shown(run)
    assert "a.py:1: AMP101 error, 1,200 times\n" in text
    assert "seen: loss scale 8" in text
    assert "and 2 more findings" in text
    assert "AMP105" not in text
    assert Page(to_html(run)).tables["findings"][1] == [
        "AMP101", "error", "a.py:1", "clipped", "loss scale 8", "1,200",
    ]  # fmt: skip
    assert "| a.py:6 | AMP106 | info | wrong |  | 6 |" in to_markdown(run)


def test_what_the_headline_says_is_no_finding_beside_it():
    finding = Finding("AMP501", "error", "train.py", 12, "asked for and not active")
    run = ObservedRun(observed(findings=[finding], precision=precision(active=False)))
    assert "AMP501" not in shown(run)
    assert "AMP501" in to_html(run)
    assert "AMP501" in to_markdown(run)


def test_figures_are_said_with_their_units():
    found = rows()
    assert found["loss"] == "10.9 at the first step, 3.21 at the last"
    assert found["time"] == (
        "31.25 ms a step (median), waited for data 1.5 s in all, 4 micro-batches a step"
    )
    assert found["loss scale"] == (
        "65,536 at first, 1,024 at last, 512 lowest; 3 growths, 9 backoffs"
    )
    assert found["skipped"] == "2 of 40 steps (3, 5); the schedule moved on in 1 of them"
    assert found["overhead"] == "observing took 0.12 ms a step, 0.4% of it"
    assert found["not observed"] == "loaders: AttributeError: gone"


def test_a_schedule_that_held_and_a_loss_that_is_lost_are_said():
    held = rows(skips=[Skip(3, noticed_by_schedule=True)], loss_last=None)
    assert held["skipped"] == "1 of 40 steps (3); schedule held"
    assert held["loss"] == "10.9 at the first step, not finite at the last"
    assert "skipped" not in rows(skips=[])
    lost = clean()
    lost.report.loss_last = float("nan")
    assert "No fault" not in shown(lost)


def test_waiting_is_a_share_of_the_steps_but_the_first():
    slow = [{**STEPS[0], "train/step_s": 60.0, "train/data_wait_s": 59.0}, *STEPS[1:]]
    run = ObservedRun(observed(), slow)
    assert run.waited_share == pytest.approx(0.25)
    assert "25% of it waiting for data" in dict(run.rows)["time"]
    assert any(each.startswith("the device waited 25% of the time") for each in run.advice)


def test_a_race_ends_in_advice():
    race = observed().race
    found = rows()
    assert found["in bf16"] == "1.46x [1.41, 1.59] as fast as the script is, 22 pairs of steps"
    assert found["in tf32"] == "not measured; no hardware for it"
    advice = ObservedRun(observed(race=race)).advice
    assert advice[0].startswith("bf16 would pay: 1.46x, with torch.autocast(")
    assert advice[1] == "fp16 would not pay: 0.24x"
    assert len(advice) == 2
    even = {"bf16": Raced(type(race["bf16"].speed)(1.01, 0.95, 1.08), 4)}
    [said] = ObservedRun(observed(race=even)).advice
    assert said == "bf16 makes no difference that was measured: 1.01x [0.95, 1.08]"


def test_lines_below_the_working_directory_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert place(f"{tmp_path}/src/a.py", 3) == "src/a.py:3"
    assert place("/elsewhere/a.py", 3) == "/elsewhere/a.py:3"
    assert place("", 0) == ""


def test_the_page_has_curves_with_skips_marked_and_no_script():
    page = to_html(ObservedRun(observed(), STEPS))
    assert Page(page).labels == [
        "Loss over training steps", "Loss scale over steps, with skipped steps",
        "Norm of the true gradients over steps, before clipping", "Time of a step, without the first",
    ]  # fmt: skip
    assert "skipped (2)" in page
    assert "waiting for data" in page
    assert "<script" not in page
    assert "<svg" not in to_html(ObservedRun(observed()))


def test_names_from_outside_are_text_in_every_form():
    findings = [Finding("AMP101", "error", HOSTILE, 1, HOSTILE, HOSTILE)]
    run = ObservedRun(observed(script=HOSTILE, ending=HOSTILE, findings=findings))
    shown(run)
    for text in (to_html(run), to_markdown(run)):
        assert "<script>" not in harmless(text).replace("\\<", "")


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_is_wider_than_the_terminal(width):
    text = shown(ObservedRun(observed(faults=[FAULT]), STEPS), width)
    assert max(map(len, text.splitlines())) <= width


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "stored"
    made.mkdir()
    (made / "observed.json").write_text(json.dumps(observed().to_json()))
    (made / "run.json").write_text('{"command": "run", "status": "finished"}')
    (made / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in STEPS))
    return made


def test_a_stored_run_shows_again_in_every_form(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert "30 of 42 matrix products" in capsys.readouterr().out
    assert main(["report", str(folder), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("# 30 of 42 matrix products ran in bfloat16")
    assert main(["report", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == observed().to_json()
    assert main(["report", str(folder), "--format", "html"]) == 0
    assert (folder / "report.html").read_text().count("<svg") == 4


def test_a_report_apart_from_its_folder_has_no_steps(folder, capsys):
    (folder / "observed.json").rename(folder / "other.json")
    assert main(["report", str(folder / "other.json"), "--format", "html"]) == 0
    assert "<svg" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "gate", "code", "said"),
    [
        ({}, "off", 0, ""),
        ({}, "fail", 1, "gate: 1 finding"),
        ({"findings": []}, "strict", 0, ""),
        ({"findings": [Finding("AMP112", "info", "a.py", 1, "x")]}, "fail", 0, ""),
        ({"findings": [Finding("AMP112", "info", "a.py", 1, "x")]}, "strict", 1, "1 finding"),
        ({"findings": [], "faults": [FAULT]}, "fail", 1, "gate: 1 fault"),
        ({"findings": [], "precision": precision(active=False)}, "fail", 1, "was not active"),
        ({"exit_code": 3, "ending": "exited with 3", "findings": []}, "off", 0, ""),
        ({"exit_code": 3, "ending": "exited with 3", "findings": []}, "fail", 1,
         "gate: the script exited with 3"),
    ],
)  # fmt: skip
def test_the_gate_of_a_stored_run(folder, capsys, changes, gate, code, said):
    (folder / "observed.json").write_text(json.dumps(observed(**changes).to_json()))
    assert main(["report", str(folder), "--gate", gate]) == code
    told = capsys.readouterr().err
    assert said in told
    assert bool(told) == bool(said)
