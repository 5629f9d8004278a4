"""``ampwise bench`` as a command: exit codes, files, what goes to which stream."""

from __future__ import annotations

import json

import pytest

from ampwise.cli.main import main

TASK = """
import torch
from ampwise import Task
def task(width: int = 16):
    return Task(name="mine", model=lambda: torch.nn.Linear(width, 4),
                batches=lambda: [torch.randn(8, width) for _ in range(4)],
                loss=lambda m, x: m(x).float().square().mean())
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return "mine.py"


def bench(*arguments: str) -> int:
    return main(
        ["bench", "--precisions", "bf16", "--steps", "4", "--parity-steps", "20", *arguments]
    )


def test_it_writes_a_report_and_says_where(task, tmp_path, capsys):
    assert bench(task) == 0
    out = capsys.readouterr().out
    assert "runs/bench-mine-1/bench.json" in out
    stored = json.loads((tmp_path / "runs/bench-mine-1/bench.json").read_text())
    assert [each["name"] for each in stored["precisions"]] == ["fp32", "bf16"]
    assert bench(task) == 0  # and never over an earlier one
    assert (tmp_path / "runs/bench-mine-2/bench.json").exists()


def test_an_error_late_in_the_run_exits_with_3_and_keeps_what_there_was(task, tmp_path, capsys):
    failing = TASK.replace("def task", "calls = []\ndef task").replace(
        ".mean())", ".mean(), evaluate=lambda m: calls.append(1) or {'a': 1 / (len(calls) != 8)})"
    )
    (tmp_path / task).write_text(failing)
    assert bench(task, "--parity-steps", "2", "--no-levers", "--quiet") == 3
    out, err = capsys.readouterr()
    assert "Failed: ZeroDivisionError" in out
    assert 'mine.py", line' in err
    assert err.endswith("raised ZeroDivisionError; what there was is in runs/bench-mine-1\n")
    folder = tmp_path / "runs/bench-mine-1"
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert json.loads((folder / "bench.json").read_text())["rounds"] == 4
    assert (folder / "report.html").exists()


def test_json_to_stdout_is_alone_there(task, capsys):
    assert bench(task, "--json", "-", "--quiet") == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("gate", "code"), [((), 0), (("--gate",), 1), (("--gate", "strict"), 1)])
def test_gate_exits_with_1_when_a_requirement_fails(task, gate, code):
    assert bench(task, "--min-speedup", "1000", *gate) == code


def test_gate_alone_lets_the_unmeasured_pass_and_strict_does_not(task):
    easy = ("--min-speedup", "0.0001", "--min-memory-reduction", "0")
    codes = {gate: bench(task, *easy, *gate) for gate in [("--gate",), ("--gate", "strict")]}
    assert codes[("--gate", "strict")] == 1  # accuracy is not measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps"),
        (["--accumulate", "-1"], "accumulate"),
        (["--max-grad-norm", "0"], "max-grad-norm"),
        (["--precisions", "bf17"], "unknown precision 'bf17'"),
        (["--precisions", ","], "comma-separated"),
        (["--min-memory-reduction", "40"], "expected a share from 0 to 1"),
        (["--device", "gpu0"], "device 'gpu0'"),
        (["--set", "width"], "KEY=VALUE"),
        (["--set", "wdth=3"], "did you mean 'width'"),
        (["--set", "width=wide"], "expected int"),
        (["--out", "/proc/nowhere"], "name a writable folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(task, arguments, message, capsys):
    assert main(["bench", task, *arguments]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message in lines[0]
