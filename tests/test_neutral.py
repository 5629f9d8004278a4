"""Names, paths, messages and source lines that would act do not, wherever they are written."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from ampwise.cli import main as frame
from ampwise.cli.main import main
from ampwise.errors import DivergedRanksError, UsageError, in_one_line
from ampwise.report.page import cell, prose, table
from ampwise.report.table import new_table
from ampwise.step.warn import warn_user
from ampwise.training.changes import refusal
from ampwise_lint import report as lint_report
from ampwise_lint.base import neutral
from ampwise_lint.base.console import Console
from ampwise_lint.base.output import Output, tell, tell_json
from ampwise_lint.base.progress import Line
from ampwise_lint.findings import Finding, LintReport, Skipped

ACTS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What no output may hold: control characters but newline and tab, surrogates, direction."""
HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J\r\n::error file=x::y\n##[error]z\u202e\udc80 [/val] [bold]"
    " </script><script>alert(1)</script> | `x` %0A"
)
HARMLESS = settings(max_examples=60, derandomize=True, deadline=None, database=None)
TEXTS = st.text(st.characters(), max_size=40) | st.sampled_from(
    [HOSTILE, "::error::", "F1[/val]", "[link=file:///etc/passwd]x", "a\n## b", "\x9b1m"]
)
COMMAND = re.compile(r"^\s*::\s*[a-z][^\n]*::|##\[", re.IGNORECASE | re.MULTILINE)


def harmless(text: str) -> str:
    """The text, after a look at whether it can be written and does nothing."""
    text.encode()
    assert not ACTS.search(text)
    assert not COMMAND.search(text)
    return text


def drawn(*things, **options) -> str:
    paper = io.StringIO()
    console = Console(file=paper, width=80, **options)
    for each in things:
        console.print(each)
    return paper.getvalue()


@HARMLESS
@given(TEXTS)
def test_a_line_stays_on_its_line_and_twice_is_once(text):
    line = neutral.line(text)
    assert "\n" not in harmless(line)
    assert neutral.line(line) == line


@pytest.mark.parametrize(
    "text",
    ["plain", "übergröße 模型 🙂", "a[::2, ::n]", "std::vector", "tab\there", "x::y", "C:\\x"],
)
def test_what_does_nothing_stays_as_it_is(text):
    assert neutral.line(text) == text


def test_each_thing_that_acts_is_spelled():
    assert neutral.line("\x1b\x9b\n\r\x7f\udc80\u2028") == r"\x1b\x9b\n\r\x7f\udc80\u2028"
    assert neutral.line(" ::error file=a::b") == r" :\:error file=a::b"
    assert neutral.line("##[group]") == r"#\#[group]"


@pytest.mark.timeout(60)
def test_a_long_text_takes_time_in_proportion():
    assert neutral.line(" ::a" * 300_000).count(":\\:a") == 299_999  # the last one ends nothing


@HARMLESS
@given(TEXTS, st.booleans())
def test_the_console_draws_text_and_nothing_else(text, colours):
    listed = new_table()
    listed.add_column(text)
    listed.add_row(text)
    listed.caption = text
    grid = Table.grid()
    grid.add_row(text, Text(text))
    shown = drawn(
        text, Text(text, style="bold"), Text.assemble("a ", (text, "red")), listed, grid,
        force_terminal=colours, color_system="standard" if colours else None,
    )  # fmt: skip
    harmless(re.sub(r"\x1b\[[0-9;]*m", "", shown) if colours else shown)


def test_names_with_markup_are_shown_as_they_are():
    assert drawn("F1[/val] [bold]x :smile:") == "F1[/val] [bold]x :smile:\n"


def test_colours_stay_where_they_were():
    shown = drawn(
        Text.assemble("a\x1b", ("bc", "red"), "d"), force_terminal=True, color_system="standard"
    )
    assert shown == "a\\x1b\x1b[31mbc\x1b[0md\n"


@HARMLESS
@given(TEXTS)
def test_markdown_is_one_table_whatever_is_in_it(text):
    lines = table(("a", text), [(text, "1"), ("x", text)], (1,))
    assert len("\n".join(lines).splitlines()) == 4
    unescaped = [re.sub(r"\\.", "", each) for each in (*lines, cell(text), prose(text))]
    assert all(each.count("|") == 3 for each in unescaped[:4])
    harmless("\n".join(lines))
    assert not re.search(r"[<`*&]", "".join(unescaped))
    assert not re.match(r"[-+=#>]|\d[.)]", prose(text))


def finding(path: str, words: str) -> Finding:
    return Finding(path, 3, 1, "AMP101", "clip-before-unscale", "error", words, source=words)


PATHS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
) | st.sampled_from(
    ["::error file=x::", "a\n::error::b.py", "50%,a:b.py", "\x1b]0;x\x07", "\udcff"]
)


@HARMLESS
@given(PATHS, TEXTS)
def test_findings_in_every_format(path, words):
    report = LintReport([finding(path, words)], [Skipped(path, words)], files=1)
    paper = io.StringIO()
    lint_report.render(report, Console(file=paper, width=80, soft_wrap=True))
    harmless(paper.getvalue())
    sarif = lint_report.to_sarif(report)
    told = sarif["runs"][0]["results"][0]
    harmless(told["message"]["text"])
    assert "](" not in told["message"]["text"].replace("\\](", "")
    assert told["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].isascii()
    for text in (json.dumps(sarif), json.dumps(report.to_json())):
        assert text.isascii()
        assert not ACTS.search(text)
    again = json.loads(json.dumps(report.to_json()))["findings"][0]
    assert (again["path"], again["message"]) == (path, words)


@HARMLESS
@given(PATHS, TEXTS)
def test_an_annotation_is_one_command_with_the_file_it_names(path, words):
    report = LintReport([finding(path, words)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", paper := io.StringIO())
        lint_report.github(report)
    (said,) = paper.getvalue().splitlines()
    assert not ACTS.search(said)
    matched = re.fullmatch(r"::error file=([^,:]*),line=3,col=1,title=[^,:]*::(.*)", said)
    assert matched
    if not ACTS.search(path) and "##[" not in path:
        named = matched[1]
        for code, char in (("3A", ":"), ("2C", ","), ("0D", "\r"), ("0A", "\n"), ("25", "%")):
            named = named.replace(f"%{code}", char)
        assert named == path


@HARMLESS
@given(TEXTS)
def test_errors_are_lines(text):
    assert "\n" not in harmless(str(UsageError(f"metric {text}: expected a name")))
    assert str(UsageError("a", f"  {text}")).count("\n") == 1
    assert "\n" not in harmless(in_one_line(ValueError(text)))
    again = pickle.loads(pickle.dumps(DivergedRanksError(text, [1])))
    assert (str(again), again.ranks) == (neutral.line(text), (1,))


def test_several_lines_of_an_error_are_its_own():
    said = str(refusal(Path("a\nb"), ["seed: 0 in the checkpoint, 1\x1b now", "more"]))
    assert said.splitlines()[:3] == [
        r"a\nb is of a run that was set up otherwise:",
        r"  seed: 0 in the checkpoint, 1\x1b now",
        "  more",
    ]


@pytest.mark.parametrize(
    "error", [UsageError(HOSTILE), OSError(2, "gone", HOSTILE), ValueError(HOSTILE)]
)
def test_every_error_line_of_the_command_is_harmless(monkeypatch, capsys, error):
    def fail(arguments):
        raise error

    monkeypatch.setattr(frame, "_dispatch", fail)
    assert main([]) in (2, 3)
    said = harmless(capsys.readouterr().err)
    assert said.startswith("ampwise: error: ")
    assert said.count("\n") == 1


def test_progress_is_one_line(monkeypatch, capsys):
    Line().say(HOSTILE)
    said = harmless(capsys.readouterr().err)
    assert said.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = Line()
    line.show(HOSTILE, now=True)
    line.clear()
    shown = capsys.readouterr().err
    harmless(shown.replace("\r", ""))
    assert shown.count("\r") == 3


def test_warnings_are_lines():
    with pytest.warns(UserWarning, match="red") as warned:
        warn_user(HOSTILE)
    assert "\n" not in harmless(str(warned[0].message))


def test_an_encoding_without_the_character_spells_it():
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("größe \udc80 ✓\n")
    output.flush()
    assert raw.getvalue() == rb"gr\xf6\xdfe \udc80 \u2713" + b"\n"


@HARMLESS
@given(TEXTS | st.sampled_from(["a ::b c::", "##[error]x", "\\##[x"]))
def test_json_on_a_terminal_is_exact(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", paper := io.StringIO())
        tell_json(json.dumps({"name": text, text: [text]}, indent=2))
    harmless(paper.getvalue())
    assert json.loads(paper.getvalue()) == {"name": text, text: [text]}


def test_tell_writes_lines(capsys):
    tell(HOSTILE, "b")
    assert harmless(capsys.readouterr().out).count("\n") == 2


# -- the command, with names from a task ------------------------------------------------------------

TASK = """
import torch
from torch import nn
from ampwise import Task

NAME = {name!r}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(NAME.replace(".", ""), nn.Linear(4, 2))

    def forward(self, x):
        return next(self.children())(x)


def task():
    torch.manual_seed(0)
    data = [torch.randn(8, 4) for _ in range(3)]
    return Task(
        model=Part,
        batches=lambda: list(data),
        loss=lambda model, x: model(x).float().pow(2).mean(),
        evaluate=lambda model: {{NAME: 0.5, "loss " + NAME: 1.0}},
        name=NAME,
    )
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text(TASK.format(name=HOSTILE))
    return "hostile.py"


def test_training_a_task_with_such_names_ends_as_any_other(hostile, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["train", hostile, "--precision", "bf16", "--allow-emulated", "--steps", "3"]
    assert main([*arguments, "--out", str(run), "--track", "csv,tensorboard"]) == 0
    said = capsys.readouterr()
    harmless(said.out)
    harmless(said.err)
    assert "off, training goes on" not in said.err
    for form in ("terminal", "markdown", "json", "html"):
        assert main(["report", str(run), "--format", form]) == 0
        said = harmless(capsys.readouterr().out)
        assert form != "json" or json.loads(said)["result"]["task"] == HOSTILE
    page = harmless((run / "report.html").read_bytes().decode())
    assert "<script" not in page
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        assert f"eval/{neutral.line(HOSTILE)}" in {row[1] for row in csv.reader(file)}
    stored = json.loads((run / "run.json").read_bytes())
    assert HOSTILE in stored["result"]["metrics"]


def test_a_metric_with_markup_in_its_name_is_no_bug(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f1.py").write_text(TASK.format(name="F1[/val]"))
    assert main(["train", "f1.py", "--precision", "fp32", "--steps", "2", "--quiet"]) == 0
    assert "held-out F1[/val]" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_no_encoding_of_the_terminal_ends_a_command(hostile, tmp_path, encoding):
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "ampwise", "train", hostile, "--precision", "fp32"]
    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, env=found, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    harmless(done.stdout.decode(encoding))
    harmless(done.stderr.decode(encoding))


def test_mlflow_takes_what_names_it_knows(tmp_path):
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    from ampwise.trackers import TrackerSet

    said: list[str] = []
    trackers = TrackerSet(["mlflow"], tmp_path, HOSTILE, {"task": HOSTILE}, said.append)
    trackers.log({f"eval/{HOSTILE}": 0.5, "eval/F1[/val]": 0.25}, 1)
    trackers.finish()
    assert said == []
    store = client(f"sqlite:///{tmp_path.resolve()}/mlflow.db")
    experiment = store.get_experiment_by_name("ampwise").experiment_id
    (run,) = store.search_runs([experiment])
    assert run.data.metrics["eval/F1_/val_"] == 0.25
