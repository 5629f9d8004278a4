"""``ampwise-lint`` as it is typed, and the flake8 plugin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

import ampwise_lint
from ampwise_lint import command
from ampwise_lint.base.page import pages
from ampwise_lint.main import main
from ampwise_lint.options import Options
from ampwise_lint.rules import all_rules
from test_source import BAD

FIXED = BAD.replace("        clip", "        scaler.unscale_(optimizer)\n        clip")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def test_findings_with_an_excerpt_and_what_to_write(file, capsys):
    assert main(["train.py"]) == 1
    said = capsys.readouterr().out
    assert "train.py:11:9: AMP101 clip-before-unscale [safe fix]" in said
    assert "11 |         clip_grad_norm_(model.parameters(), 1.0)" in said
    assert "scaler.unscale_(optimizer)" in said
    assert said.endswith("1 file: 1 error; --fix mends 1\n")


def test_clean_code(file, capsys):
    file.write_text(FIXED)
    assert main([]) == 0
    assert capsys.readouterr().out == "1 file: no findings\n"


def test_fix_mends_in_place_and_a_second_run_changes_nothing(file, capsys):
    assert main(["--fix", "."]) == 0
    assert "1 mended" in capsys.readouterr().out
    assert file.read_text() == FIXED
    stamp = file.stat().st_mtime_ns
    assert main(["--fix", "."]) == 0
    assert file.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_fix_keeps_encoding_and_line_ends(file, ends):
    head = "# -*- coding: latin-1 -*-\n# für später\n"
    file.write_bytes((head + BAD).replace("\n", ends).encode("latin-1"))
    assert main(["--fix"]) == 0
    assert file.read_bytes() == (head + FIXED).replace("\n", ends).encode("latin-1")


def test_unsafe_fixes_are_left_alone_without_being_asked_for(file):
    text = FIXED.replace(
        "def train(model, loader, optimizer, scaler, criterion):\n",
        "def train(model, loader, scaler, criterion):\n"
        "    optimizer = torch.optim.Adam(model.parameters())  # the usual\n",
    )
    file.write_text(text)
    assert main(["--fix"]) == 1
    assert file.read_text() == text
    assert main(["--unsafe-fixes"]) == 0
    assert "Adam(model.parameters(), fused=True)  # the usual" in file.read_text()


def test_nothing_is_edited_without_fix(file):
    for flags in ([], ["--statistics"], ["--format", "json"], ["--format", "sarif"]):
        main([*flags])
    assert file.read_text() == BAD


def test_json(file, capsys):
    assert main(["--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "ampwise.lint/1"
    assert (report["files"], report["skipped"]) == (1, [])
    (finding,) = report["findings"]
    assert finding["path"] == "train.py"
    assert (finding["line"], finding["column"]) == (11, 9)
    assert (finding["code"], finding["name"]) == ("AMP101", "clip-before-unscale")
    assert (finding["severity"], finding["fixable"]) == ("error", True)
    assert main(["--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == report


def test_github_annotations(file, capsys):
    main(["--format", "github"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error file=train.py,line=11,col=9,title=AMP101 clip-before-unscale::")


def test_sarif(file, capsys):
    (file.parent / "broken one.py").write_text("def f(:\n")
    main(["--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (rule,) = run["tool"]["driver"]["rules"]
    (result,) = run["results"]
    assert (rule["id"], result["ruleId"], result["ruleIndex"]) == ("AMP101", "AMP101", 0)
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "train.py"}
    assert place["region"] == {"startLine": 11, "startColumn": 9}
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    where = note["locations"][0]["physicalLocation"]["artifactLocation"]
    assert where == {"uri": "broken%20one.py"}
    main(["--format", "github"])
    warned = capsys.readouterr().out.splitlines()[-1]
    assert warned.startswith("::warning file=broken one.py,title=not read::syntax error in line 1")


def test_statistics(file, capsys):
    assert main(["--statistics"]) == 1
    assert capsys.readouterr().out.split()[:3] == ["1", "AMP101", "clip-before-unscale"]


@pytest.mark.parametrize("word", ["AMP101", "amp101", "clip-before-unscale"])
def test_explain(capsys, word):
    assert main(["--explain", word]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# AMP101 clip-before-unscale (error)\n")
    assert "## Why is this bad" in said


def test_every_rule_can_be_explained(capsys):
    for code in all_rules():
        assert main(["--explain", code]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.py"], "nope.py: no such file or folder"),
        (["x" * 300], "no such file or folder"),
        (["--exclude", "train.py"], ".: no file to check: expected one that ends in .py"),
        (["--html", "no/folder.html"], "html: cannot write to no/folder.html"),
        (["--explain", "AMP999"], "expected a rule's code (AMP101 to AMP404)"),
        (["--select", "clip-befor-unscale"], "did you mean 'clip-before-unscale'?"),
        (["--format", "xml"], "expected one of text, json, github, sarif"),
        (["--jobs", "-1"], "expected 0 or more"),
        (["--jobs", "x"], "--jobs: expected an integer, got 'x'"),
        (["--fix=yes"], "--fix: takes no value"),
        (["train.py", "--select"], "--select: expected a value"),
        (["--formt", "json"], "unknown option --formt; did you mean '--format'?"),
        (["-x"], "unknown option -x; ampwise-lint --help lists the options"),
        (["--json", "no/folder.json"], "json: cannot write to no/folder.json"),
        (["--baseline", "none.json"], "--write-baseline makes one"),
    ],
)
def test_bad_input(file, capsys, arguments, message):
    assert main([*arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_options_stand_anywhere_and_add_up(file, capsys):
    (file.parent / "more.py").write_text(BAD)
    many = ["train.py", "--select", "AMP2", "more.py", "--select=AMP1,AMP3", "--ignore", "AMP3"]
    assert main([*many, "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 2
    assert report["statistics"] == {"AMP101": 2}


def test_what_begins_with_a_dash_is_a_path_behind_two(file, capsys):
    file.rename("-x.py")
    assert main(["--quiet", "--", "-x.py"]) == 1
    assert "-x.py:11:9: AMP101" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_option(capsys, word):
    assert main(["--select", "AMP1", word]) == 0
    said = capsys.readouterr().out
    for each in fields(Options):
        flag = f"--{each.name.replace('_', '-')}"
        assert (flag if each.name != "paths" else "PATH") in said
    assert "Executes nothing" in said


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampwise-lint {ampwise_lint.__version__}\n"


def test_an_error_is_one_line_and_debug_says_where(file, capsys, monkeypatch):
    monkeypatch.setattr(command, "lint", lambda *_, **__: 1 / 0)
    assert main([]) == 3
    assert capsys.readouterr().err == (
        "ampwise: error: ZeroDivisionError: division by zero (this is a bug in ampwise; "
        "--debug shows where)\n"
    )
    assert main(["--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_interrupted(file, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "lint", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == "ampwise: interrupted\n"


def test_a_page_without_jinja2_names_the_extra_before_the_work(file, capsys, monkeypatch):
    pages.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["--html", "page.html"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "ampwise: error: a page needs jinja2, which is not installed: "
        "pip install 'ampwise-lint[html]'\n"
    )
    assert said.out == ""
    assert not (file.parent / "page.html").exists()


def test_baseline(file, capsys):
    assert main(["--write-baseline", "known.json"]) == 0
    assert main(["--baseline", "known.json"]) == 0
    assert "1 known" in capsys.readouterr().out


def test_flake8_runs_the_rules(file):
    pytest.importorskip("flake8")
    done = subprocess.run(
        [sys.executable, "-m", "flake8", "--select", "AMP", "train.py"],
        capture_output=True, text=True, cwd=file.parent, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("train.py:11:9: AMP101 gradients are clipped")


def test_all_edits_of_a_finding_are_made_or_none(tmp_path):
    """The flag of AMP112 would say "stepped" on every step, were it not set beside the update."""
    path = tmp_path / "train.py"
    path.write_text(
        """\
import torch


def train(model, loader, optimizer, scheduler, scaler=None):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update()
        else:
            loss.backward()
            optimizer.step()
        scheduler.step()
"""
    )
    before = path.read_text()
    assert main([str(path), "--unsafe-fixes", "--select", "AMP112"]) == 1
    assert path.read_text() == before


NAMES = [
    "::error file=x::y.py",
    "a\n::error::b.py",
    "50%,c:d.py",
    "\x1b]0;t\x07[red].py",
    "\udcff.py",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_file_names_do_nothing_in_any_format(tmp_path, capsys, monkeypatch, form, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(BAD)
    unreadable = name == "\udcff.py"  # named as a file that was not read
    found = main([name if form != "text" else ".", "--format", form])
    assert found == (2 if unreadable else 1)
    said = harmless_lines(capsys.readouterr().out, commands=form == "github")
    if form in ("json", "sarif") and not unreadable:
        assert len(json.loads(said)["findings" if form == "json" else "runs"]) == 1
    for option in ("--write-baseline", "--baseline"):
        assert main([".", option, "known.json"]) == (2 if unreadable else 0)


ACTS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What no output may hold: control characters but newline and tab, surrogates, direction."""


def harmless_lines(text: str, *, commands: bool) -> str:
    text.encode()
    assert not ACTS.search(text)
    starts = [line for line in text.splitlines() if line.lstrip().startswith("::")]
    assert len(starts) == (1 if commands else 0)
    return text
