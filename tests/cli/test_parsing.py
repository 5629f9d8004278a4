"""A command line and a file become options; what does not fit is one line that says what would."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from ampwise.cli.main import main
from ampwise.cli.options import Common, Gate, positive
from ampwise.cli.parsing import parse
from ampwise.errors import UsageError
from ampwise_lint.base.results import write_json


@dataclass
class Options(Common):
    """Do a thing."""

    steps: int | None = None
    """How many; at least 50 % of them."""

    rate: float = 1.5
    """How fast."""

    precisions: str | None = None
    """Which, separated by commas."""

    name: Annotated[str, tyro.conf.arg(metavar="WHO")] = "me"

    gate: Gate = "off"
    """Fail on it."""


def options(*arguments: str) -> Options:
    parsed = parse(Options, arguments, "ampwise thing")
    assert parsed is not None
    return parsed


def refusal(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        options(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_the_defaults():
    assert options() == Options()


def test_each_kind_of_flag():
    parsed = options(
        "--steps", "3", "digits", "--rate=0.5", "--quiet", "--out", "here", "--set", "a=1",
        "--set", "b=x=y", "--json", "-", "--gate", "strict",
    )  # fmt: skip
    assert (parsed.task, parsed.steps, parsed.rate) == ("digits", 3, 0.5)
    assert (parsed.quiet, parsed.out, parsed.json) == (True, Path("here"), "-")
    assert parsed.settings() == {"a": "1", "b": "x=y"}
    assert parsed.gate == "strict"


@pytest.mark.parametrize("place", [("digits", "--quiet"), ("--quiet", "digits")])
def test_the_task_may_stand_before_or_after_flags(place):
    assert options(*place).task == "digits"


@pytest.mark.parametrize(
    ("given", "gate", "task"),
    [
        (["--gate"], "fail", "charlm"),
        (["--gate", "digits"], "fail", "digits"),
        (["--gate", "strict"], "strict", "charlm"),
        (["--gate", "off", "digits"], "off", "digits"),
        (["--gate", "--quiet"], "fail", "charlm"),
    ],
)
def test_gate_alone_means_fail(given, gate, task):
    parsed = options(*given)
    assert (parsed.gate, parsed.task) == (gate, task)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--stepz", "3"], "unknown option --stepz; did you mean '--steps'?"),
        (["--step=3"], "unknown option --step; did you mean '--steps'?"),
        (["-q"], "unknown option -q; ampwise thing --help lists the options"),
        (["--steps", "x"], "--steps: expected an integer, got 'x'"),
        (["--steps", "1.5"], "--steps: expected an integer, got '1.5'"),
        (["--rate", "fast"], "--rate: expected a number, got 'fast'"),
        (["--steps"], "--steps: expected a value"),
        (
            ["--gate=stritc"],
            "--gate: expected one of off, fail, strict, got 'stritc'; did you mean 'strict'?",
        ),
        (["--steps", "it's"], '--steps: expected an integer, got "it\'s"'),
        (["--steps", "x" * 200], f"--steps: expected an integer, got '{'x' * 200}'"),
        (["--quiet=true"], "--quiet: takes no value"),
        (["a", "b"], "unexpected argument 'b': only one TASK can be given"),
    ],
)
def test_what_does_not_fit_is_one_line(given, message):
    assert refusal(*given) == message


@pytest.mark.parametrize("pair", ["a", "=1", ""])
def test_a_setting_is_a_pair(pair):
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        options("--set", pair).settings()


def test_a_negative_number_reaches_the_check_of_its_value():
    parsed = options("--steps", "-4")
    with pytest.raises(UsageError, match=r"^steps: expected a positive integer, got -4$"):
        positive("steps", parsed.steps)


@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan")])
def test_positive_refuses(value):
    with pytest.raises(UsageError, match=r"^window: expected a positive"):
        positive("window", value)


@pytest.mark.parametrize("value", [None, 1, 0.1, float("inf")])
def test_positive_lets_pass(value):
    positive("window", value)


def test_help_says_what_the_fields_say(capsys):
    assert parse(Options, ["--help"], "ampwise thing") is None
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert said.startswith("usage: ampwise thing [-h] [OPTIONS] [TASK] Do a thing.")
    assert "--steps INT How many; at least 50 % of them." in said
    assert "--rate FLOAT How fast. (default: 1.5)" in said
    assert "--seed INT Seed of initialisation, dropout and data order. (default: 0)" in said
    assert "--name WHO" in said
    assert "(default: None)" not in said
    assert "(default: False)" not in said
    assert "--gate {off,fail,strict}" in said
    assert "--debug" in said


@pytest.mark.parametrize("command", ["bench", "diagnose", "report", "train", "tune"])
def test_help_breaks_its_lines_where_the_terminal_does(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command, "--help"]) == 0
    boxed = capsys.readouterr().out.rpartition(" options ")[2].splitlines()[1:-1]
    lines = [line.strip("│ ") for line in boxed]
    assert len(lines) > 4
    for line, below in itertools.pairwise(lines):  # a flag, or what stands below a long one
        assert below.startswith("-") or line.startswith("-"), below


@pytest.mark.parametrize("command", ["bench", "train", "advise"])
def test_every_option_of_every_command_has_help(command):
    kind = importlib.import_module(f"ampwise.cli.{command}").Options
    sources = "".join(inspect.getsource(each) for each in kind.__mro__[:-1])
    for field in dataclasses.fields(kind):
        assert re.search(
            rf'^    {field.name}: [^"]*(?:"[^"]*"[^"]*)*\n    """\w', sources, re.MULTILINE
        )


def test_a_switch_says_what_it_does_not_what_is_done_without_it(capsys):
    assert main(["verify", "--help"]) == 0
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "--no-bench Leave out speed, memory and accuracy, which take minutes. --seeds" in said
    assert "(default: csv)" in said
    assert not re.search(r"\(default: (None|True|False)?\)", said)


FILES = {
    "toml": 'task = "digits"\nsteps = 7\nprecisions = ["bf16", "fp16"]\nquiet = true\nrate = 2\n'
    '[set]\nsize = "tiny"\n',
    "yaml": "task: digits\nsteps: 7\nprecisions: [bf16, fp16]\nquiet: true\nrate: 2\n"
    "set:\n  size: tiny\n",
}


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_sets_options_and_flags_win(tmp_path, suffix):
    file = tmp_path / f"config.{suffix}"
    file.write_text(FILES[suffix])
    parsed = options("--config", str(file), "--steps", "9")
    assert (parsed.task, parsed.steps, parsed.precisions) == ("digits", 9, "bf16,fp16")
    assert (parsed.quiet, parsed.rate, parsed.settings()) == (True, 2.0, {"size": "tiny"})
    assert options(f"--config={file}", "--set", "size=base").settings() == {"size": "base"}


def test_a_flag_wins_even_with_its_default_value(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("rate = 9.0\n")
    assert options("--config", str(file), "--rate", "1.5").rate == 1.5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.toml", "stepz = 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("c.toml", "zzz = 3", "unknown key 'zzz'; expected one of json, task, set"),
        ("c.toml", 'config = "other.toml"', "unknown key 'config'"),
        ("c.toml", "steps = 'abc'", "steps: expected an integer, got 'abc'"),
        ("c.toml", "steps = true", "steps: expected text or a number, got True"),
        ("c.yaml", "device:", "device: expected text or a number, got None"),
        ("c.yaml", "task: {a: 1}", "task: expected text or a number, got {'a': 1}"),
        ("c.toml", "quiet = 1", "quiet: expected true or false, got 1"),
        ("c.yaml", "set: size", "set: expected a table of names and values, got 'size'"),
        ("c.yaml", "steps:", "steps: expected text or a number, got None"),
        ("c.yaml", "gate: of", "gate: expected one of off, fail, strict, got 'of'"),
        ("c.yaml", "- a", "expected options by name, got a list"),
        ("c.yaml", "a: [", "not valid yaml"),
        ("c.yaml", "a: !!python/object/apply:os.getcwd []", "not valid yaml"),
        ("c.toml", "a =", "not valid toml"),
        ("c.json", "{}", "expected a .toml, .yaml or .yml file"),
        ("c.yaml", "steps: 2026-13-45", "not valid yaml: month must be in 1..12"),
        ("c.toml", "steps = 2026-13-45", "not valid toml"),
        ("c.toml", "steps = 2026-01-01", "steps: expected text or a number, got datetime.date"),
        ("c.yaml", "set: {a: 2026-01-01}", "set.a: expected text or a number, got datetime.date"),
        ("c.yaml", "set: {a: null}", "set.a: expected text or a number, got None"),
        ("c.yaml", "set: {a: [1, 2]}", "set.a: expected text or a number, got [1, 2]"),
        ("c.yaml", "precisions: [[fp32]]", "precisions: expected text or a number, got ['fp32']"),
        ("c.yaml", "steps: 1\nsteps: 2", "not valid yaml: line 2 has a key twice: 'steps'"),
        ("c.yaml", "set: {a: 1, a: 2}", "line 1 has a key twice: 'a'"),
        ("c.toml", "steps = 1\nsteps = 2", "not valid toml"),
        ("c.yaml", "? [a]\n: 1", "line 1 has a key that is no word"),
        ("c.yaml", "a: &a [x]\nset: *a", "it has an alias (*name): write the value out"),
        ("c.yaml", "a: " + "{" * 20_000, "not valid yaml: nested too deeply"),
        ("c.yaml", "a: " + "[" * 5_000, "not valid yaml: nested too deeply"),
        ("c.toml", "a = " + "[" * 5_000, "not valid toml: nested too deeply"),
        ("c.yaml", "steps: .nan", "--steps: expected an integer, got 'nan'"),
        ("c.yaml", "steps: " + "9" * 400, "steps: expected text or a number, got 9999"),
        ("c.yaml", "steps: " + "9" * 5_000, "not valid yaml: Exceeds the limit"),
        ("c.yaml", f"steps: '{'9' * 400}'", "--steps: expected an integer below 2^63, got 9999"),
        ("c.toml", "steps = " + "9" * 5_000, "not valid toml: Exceeds the limit"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_with_its_name(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    said = refusal("--config", str(file))
    assert str(file) in said
    assert message in said


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_that_is_none_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "c.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert f"expected a file, it is a {kind}" in refusal("--config", str(path))


def test_a_switch_may_be_on_in_the_file_and_on_the_command_line(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("quiet = true")
    assert options("--config", str(file), "--quiet").quiet
    assert options("--config", str(file)).quiet


def test_an_empty_file_sets_nothing_and_a_missing_one_is_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert options("--config", str(file)).steps is None
    assert "nowhere.toml: No such file" in refusal("--config", "nowhere.toml")


def test_json_goes_to_a_file_or_standard_output(tmp_path, capsys):
    write_json("{}", None)
    write_json("{}", "-")
    assert capsys.readouterr() == ("{}\n", "")
    file = tmp_path / "a.json"
    for did in ("wrote", "replaced"):
        write_json("{}", str(file))
        assert capsys.readouterr() == ("", f"{did} {file}\n")
    assert file.read_text() == "{}\n"
    with pytest.raises(UsageError, match="name a writable file"):
        write_json("{}", str(tmp_path / "no" / "a.json"))
