"""``ampwise run`` as a user types it: every script runs in a process of its own.

Most are forks of a process that has imported torch (`tests.forked`); where Python's own start, or the
shell's, is part of what is tested, it is a fresh one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampwise.cli.main import main
from ampwise.cli.run import script_at
from ampwise.observe import misuse
from ampwise.observe.result import RunReport
from ampwise.report import run as run_report
from tests.forked import Python
from tests.observe.inside import line_of

TRAINS = """
import atexit, os, signal, sys, tempfile, torch
print("arguments", sys.argv[1:])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script that trains twenty steps, and then does something more."""

    def write(more: str = "") -> Path:
        (tmp_path / "train.py").write_text(TRAINS + more)
        return tmp_path / "train.py"

    return write


def fresh(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """A Python that starts with this command."""
    command = [sys.executable, "-m", "ampwise", *arguments]
    options.setdefault("capture_output", True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(command, check=False, text=True, env=env, **options)


def ampwise(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fork with this command."""
    command = ["-m", "ampwise", *arguments]
    return subprocess.CompletedProcess(command, *Python(command, Path.cwd()).ended())


def observed(folder: str) -> dict:
    return json.loads((Path(folder) / "observed.json").read_text())


# -- what is typed wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no script: expected ampwise run [OPTIONS] SCRIPT [ARGS], or -m MODULE [ARGS]"),
        (("nothere.py",), "no such script: nothere.py; expected a path, or -m and a module's name"),
        ((".",), ".: a folder without __main__.py; expected a Python script"),
        (("-m",), "-m: expected the name of a module"),
        (("-m", "no_such_module"), "-m: No module named no_such_module; expected a module that"),
        (("-m", "os.nothing"), "-m: Error while finding module specification for 'os.nothing'"),
        (("-m", "json"), "-m: No module named json.__main__; 'json' is a package and cannot be"),
        (("--stps", "3", "train.py"), "unknown option --stps; did you mean '--steps'?"),
        (("-x", "train.py"), "unknown option -x; ampwise run --help lists the options"),
        (("--on-fault", "diagnos", "train.py"),
         "--on-fault: expected one of diagnose, stop, off, got 'diagnos'; did you mean 'diagnose'?"),
        (("--steps", "train.py"), "--steps: expected an integer, got 'train.py'"),
        (("--steps", "0", "train.py"), "steps: expected a positive integer, got 0"),
        (("--steps",), "--steps: expected a value"),
        (("--track", "cvs", "train.py"), "track: unknown tracker 'cvs'"),
        (("--json", "nowhere/x.json", "train.py"), "there is no folder nowhere"),
        (("--out", "old", "train.py"), "old already holds a run: another --out starts a new one"),
        (("--out", "train.py/new", "train.py"), "train.py is no folder; name a writable folder"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_nothing_runs(script, tmp_path, capsys, arguments, said):
    script("open('ran', 'w')")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    assert main(["run", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ampwise: error: ")
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_help_says_where_the_script_goes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run", "--help"]) == 0
    told = capsys.readouterr().out
    assert "usage: ampwise run [-h] [OPTIONS] SCRIPT [ARGS]" in told
    assert "default: ''" not in told
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("train.py --steps 3", 0),
        ("--steps 3 train.py --quiet", 2),
        ("--steps=3 train.py", 1),
        ("--quiet --debug train.py", 2),
        ("--gate train.py", 1),
        ("--gate strict train.py", 2),
        ("--json - -m package.train --help", 2),
        ("--help train.py", 1),
    ],
)
def test_own_options_stand_before_the_script(words, place):
    assert script_at(words.split()) == place


# -- what is seen ----------------------------------------------------------------------------------


def test_a_script_runs_as_ever_and_the_report_is_on_standard_error(script):
    script()
    done = fresh("run", "--track", "csv", "train.py", "--steps", "2", "--help")
    assert done.returncode == 0
    assert done.stdout == "arguments ['--steps', '2', '--help']\n"
    lines = done.stderr.strip().splitlines()
    assert lines[0] == "Every matrix product ran in float32, and nothing less was asked for"
    assert lines[-1] == "report: runs/run-train-1/observed.json, steps.jsonl and report.html"
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 10
    folder = Path("runs/run-train-1")
    assert {each.name for each in folder.iterdir()} == {
        "run.json", "steps.jsonl", "observed.json", "report.html", "metrics.csv",
    }  # fmt: skip
    assert observed(str(folder))["steps"] == 20
    assert (folder / "report.html").read_text().count("<svg") >= 3
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_json_has_standard_output_for_itself(script):
    script('atexit.register(print, "at exit")')
    done = ampwise("run", "--json", "-", "--out", "made", "train.py")
    assert json.loads(done.stdout) == observed("made")
    assert done.stderr == "arguments []\nat exit\n"


def test_json_is_there_also_when_a_signal_ends_the_script(script):
    script("os.kill(os.getpid(), signal.SIGTERM)")
    done = ampwise("run", "--json", "-", "train.py")
    assert done.returncode == -15
    assert json.loads(done.stdout)["ending"] == "terminated"


def test_quiet_writes_files_and_says_nothing(script):
    script()
    done = ampwise("run", "--quiet", "--steps", "3", "--out", "made", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert (observed("made")["steps"], observed("made")["ending"]) == (3, "stopped")


def test_an_interrupted_script_is_reported_with_130(script):
    script("os.kill(os.getpid(), signal.SIGINT)")
    done = ampwise("run", "--out", "made", "train.py")
    assert done.returncode == 130
    assert f"line {line_of(Path('train.py'), 'SIGINT')}, in <module>" in done.stderr
    assert "ampwise/" not in done.stderr
    assert "train.py interrupted after 20 steps" in done.stderr
    assert observed("made")["exit_code"] == 130


def test_a_script_without_training_leaves_no_folder(tmp_path):
    (tmp_path / "other.py").write_text('print("hello"); raise SystemExit(7)')
    done = ampwise("run", "--out", "made", "other.py")
    assert (done.returncode, done.stdout) == (7, "hello\n")
    assert done.stderr == "\nNo step of an optimizer was seen: other.py exited with 7\n"
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "runs").exists()


def test_a_script_that_goes_elsewhere_leaves_its_files_where_it_began(script, tmp_path):
    script("gone = tempfile.mkdtemp(); os.chdir(gone); os.rmdir(gone)")
    done = ampwise("run", "--json", "seen.json", "train.py")
    assert done.returncode == 0
    assert json.loads((tmp_path / "seen.json").read_text()) == observed("runs/run-train-1")
    assert "report: runs/run-train-1/observed.json" in done.stderr


# -- what cannot be written ------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_said_once_and_the_script_goes_on(script, tmp_path):
    script('print("survived")')
    (tmp_path / "runs").write_text("in the way")
    done = ampwise("run", "--json", "seen.json", "train.py")
    assert done.returncode == 0
    assert "survived" in done.stdout
    assert done.stderr.count("Not a directory") == 1
    assert "nothing is written; the script is not affected" in done.stderr
    assert "Every matrix product ran in float32" in done.stderr
    assert "report: " not in done.stderr
    assert json.loads((tmp_path / "seen.json").read_text())["not_observed"] == []


def test_a_full_disk_is_said_and_the_script_goes_on(script):
    script('print("survived")')
    limited = [f"{sys.executable} -m ampwise run --out made train.py"]
    done = subprocess.run(
        ["bash", "-c", "ulimit -f 4; " + limited[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "survived" in done.stdout
    assert "(the report is incomplete; the script is not affected)" in done.stderr
    assert "Every matrix product ran in float32" in done.stderr


def test_json_on_a_full_disk_is_said(script):
    script()
    with open("/dev/full", "w") as full:
        done = fresh("run", "--json", "-", "train.py", capture_output=False, stdout=full,
                     stderr=subprocess.PIPE)  # fmt: skip
    assert done.returncode == 0
    assert "No space left on device (there is no JSON; the script is not affected)" in done.stderr


def test_a_report_that_fails_does_not_cost_the_exit_code(script, capfd, monkeypatch):
    script("sys.exit(5)")
    monkeypatch.setattr(run_report, "render", lambda *_: 1 / 0)
    assert main(["run", "--out", "made", "train.py"]) == 5
    told = capfd.readouterr().err
    assert "ZeroDivisionError: division by zero, a bug in ampwise (the report is incomp" in told


# -- gates -----------------------------------------------------------------------------------------


def test_a_precision_that_is_not_active_is_the_first_line_and_fails_the_gate(script):
    path = script()
    inside = '    with torch.autocast("cuda", dtype=torch.float16): loss ='
    quiet = "import warnings; warnings.simplefilter('ignore')\n"  # torch warns of this, too
    path.write_text(quiet + path.read_text().replace("    loss =", inside))
    done = ampwise("run", "--gate", "--out", "made", "train.py")
    line = line_of(path, "autocast")
    wanted = (
        f"Precision asked for, but not active: float16 was asked for (train.py:{line}), every "
        "matrix product ran in float32"
    )
    assert " ".join(done.stderr.split()).startswith(wanted)
    assert done.stderr.endswith("ampwise: gate: the precision asked for was not active\n")
    assert done.returncode == 1
    assert main(["report", "made", "--gate"]) == 1
    assert main(["report", "made"]) == 0


def test_the_script_s_own_exit_code_is_kept(script):
    script("sys.exit(3)")
    done = ampwise("run", "--gate", "strict", "--out", "made", "train.py")
    assert done.returncode == 3
    assert "train.py exited with 3 after 20 steps" in done.stderr
    assert main(["report", "made"]) == 0


def test_a_run_that_was_killed_is_said_to_be_unfinished(script, capsys):
    script("os.kill(os.getpid(), signal.SIGKILL)")
    assert ampwise("run", "--out", "made", "train.py").returncode == -9
    assert main(["report", "made"]) == 2
    assert capsys.readouterr().err == (
        "ampwise: error: made holds no finished observed run: it is running\n"
    )


# -- what the documentation says -------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "run.md").read_text()


def test_the_codes_in_the_documentation_are_those_that_are_found():
    written = re.findall(r"^\| (AMP\d+) \| (\w+) \|", DOCS, re.MULTILINE)
    source = Path(misuse.__file__).read_text()
    found = re.findall(r'_note\(\s*"(AMP\d+)", "(\w+)"', source)
    assert sorted(written) == sorted(found)


def test_the_keys_in_the_documentation_are_those_of_the_json():
    table = DOCS.partition("| key | what it holds |")[2]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    named = {re.split(r"[.\[`]", name)[0] for cell in cells for name in cell[1:-1].split("`, `")}
    fields = {each.name for each in dataclasses.fields(RunReport)}
    in_precision = {"parameters", "gradients", "optimizer_state", "float32_products"}
    assert named - in_precision == fields


def test_every_option_is_documented(capsys):
    assert main(["run", "--help"]) == 0
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {each for each in options - {"--help", "--debug"} if each not in DOCS} == set()
