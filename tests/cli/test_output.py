"""A command outlives its standard output: files, exit code, and one line where a disk is full."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ampwise.cli import main as frame
from ampwise.cli.main import main
from ampwise.cli.options import Common
from ampwise_lint.base.output import Output

FULL = OSError(28, "No space left on device")
GONE = BrokenPipeError(32, "Broken pipe")


class Failing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(("error", "complaint"), [(FULL, "standard output: No space"), (GONE, "")])
def test_output_fails_once_and_then_goes_nowhere(error, complaint):
    output = Output(Failing(error))
    assert output.write("a") == 1
    output.write("b")
    output.flush()
    assert output.complaint.startswith(complaint)
    assert bool(output.complaint) == bool(complaint)


@pytest.mark.parametrize(("error", "code"), [(FULL, 3), (GONE, 1)])
def test_work_after_the_output_is_lost_is_done(monkeypatch, tmp_path, capsys, error, code):
    def run(options):
        print("first")
        (tmp_path / "done").write_text("")
        print("second")
        return 1

    monkeypatch.setitem(frame.COMMANDS, "thing", "does a thing")
    module = SimpleNamespace(Options=Common, run=run)
    monkeypatch.setitem(sys.modules, "ampwise.cli.thing", module)
    monkeypatch.setattr(sys, "stdout", Failing(error))
    assert main(["thing"]) == code
    assert (tmp_path / "done").exists()
    said = capsys.readouterr().err
    assert said == (
        "ampwise: error: standard output: No space left on device\n" if code == 3 else ""
    )


@pytest.mark.parametrize(
    ("into", "code"),
    [
        ("--quiet | true; exit ${PIPESTATUS[0]}", 1),
        ("2>&1 | true; exit ${PIPESTATUS[0]}", 1),
        ("--quiet > /dev/full", 3),
    ],
)
def test_a_diagnosis_is_stored_whoever_reads_it(tmp_path, into, code):
    (tmp_path / "scores.py").write_text(
        "from tests.numerics.cases import CASES\ntask = CASES['scores before scaling'].make\n"
    )
    command = f"{sys.executable} -m ampwise diagnose scores.py --out run {into}"
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=found)
    assert done.returncode == code
    assert done.stderr.count("\n") == (code == 3)
    stored = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert stored["cause"] == "RANGE_OVERFLOW"
    assert any(each["verified"] for each in stored["fixes"])
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("target", "why"),
    [("no/where.json", "there is no folder no"), (".", "it is a folder")],
)
@pytest.mark.parametrize("command", ["bench", "advise"])
def test_json_that_cannot_be_written_is_said_first(capsys, command, target, why):
    assert main([command, "--json", target]) == 2
    said = capsys.readouterr().err
    assert said == f"ampwise: error: json: cannot write to {target}: {why}; name a writable file\n"


def test_letters_that_the_output_does_not_have_are_escaped(tmp_path):
    (tmp_path / "später.py").write_text("def f(:", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ampwise", "lint"],
        capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"")
    assert b"sp\\xe4ter.py: not read: syntax error in line 1" in done.stdout
