"""The frame of the command line: finding commands, and where every error ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ampwise
from ampwise import errors
from ampwise.cli import main as frame
from ampwise.cli.main import main
from ampwise.cli.options import Common
from ampwise_lint.main import main as linter


@pytest.fixture
def command(monkeypatch):
    """Makes ``ampwise thing`` run a function."""

    def install(run):
        module = SimpleNamespace(Options=Common, run=run)
        monkeypatch.setitem(frame.COMMANDS, "thing", "does a thing")
        monkeypatch.setitem(sys.modules, "ampwise.cli.thing", module)

    return install


def raising(error: BaseException):
    def run(options):
        raise error

    return run


def of_the_user(error: Exception, where: str) -> Exception:
    error.__ampwise_user__ = where
    return error


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(capsys, arguments):
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in frame.COMMANDS)


def test_lint_is_the_linters_own_command(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.amp.GradScaler()\n")
    for arguments in (["."], ["--format", "sarif"], ["--statistics"], ["--formt", "json"]):
        code = main(["lint", *arguments])
        ours = capsys.readouterr()
        assert code == linter(arguments)
        theirs = capsys.readouterr()
        assert (ours.out, ours.err) == (theirs.out, theirs.err)
    assert main(["lint", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ampwise lint [PATH ...] [OPTIONS]\n")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampwise {ampwise.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bensh"],
            "unknown command 'bensh': expected one of bench, verify, diagnose, tune, lint, report, run, train, advise; did you mean",
        ),
        (["--hlep"], "unknown option '--hlep': expected one of --help, --version; did you mean"),
        (["advise", "--devise", "cpu"], "unknown option --devise; did you mean '--device'?"),
        (["advise", "charlm"], "unexpected argument 'charlm': ampwise advise takes options only"),
        (["bench", "--steps", "0"], "steps: expected a positive integer, got 0"),
        (["bench", "--accumulate", "-2"], "accumulate: expected a positive integer, got -2"),
        (["bench", "--precisions", "bf61"], "unknown precision 'bf61'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ampwise: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.TaskError("no such task"), 2, "error: no such task"),
        (errors.GateError("too slow"), 1, "error: too slow"),
        (errors.SkippedStepsError("50 skipped"), 3, "error: 50 skipped"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "runs/a"), 3, "error: runs/a: No space left on"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 3, "error: out of memory: use sm"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), 3, "error: out of memory"),
        (MemoryError(), 3, "error: out of memory"),
        (of_the_user(MemoryError(), "loss"), 3, "error: out of memory"),
        (SystemExit(0), 2, "error: the task called sys.exit(0)"),
        (
            ZeroDivisionError("division\nby zero"),
            3,
            "error: ZeroDivisionError: division by zero (this is a bug in ampwise; --debug "
            "shows where)",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else None,
)
def test_an_error_is_one_line_and_its_exit_code(command, capsys, error, code, message):
    command(raising(error))
    assert main(["thing"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"ampwise: {message}")
    assert err.count("\n") == 1


def test_debug_shows_where(command, capsys):
    command(raising(ZeroDivisionError("no")))
    assert main(["thing", "--debug"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert 'test_main.py", line' in err
    assert "--debug shows" not in err


def test_an_error_of_the_task_shows_the_tasks_frames_only(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def task():\n    return helper()\n\ndef helper():\n    return 1 / 0\n")
    assert main(["bench", str(file), "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert 'mine.py", line 5, in helper' in err
    assert "ZeroDivisionError: division by zero" in err
    assert os.path.dirname(ampwise.__file__) not in err
    assert err.splitlines()[-1].endswith("raised ZeroDivisionError")
    assert "bug in ampwise" not in err


def test_sigterm_is_an_interruption_and_the_handler_is_put_back(command):
    def own(number, frame):
        raise AssertionError("the handler of before was called")

    before = signal.signal(signal.SIGTERM, own)
    try:
        command(lambda options: os.kill(os.getpid(), signal.SIGTERM) or signal.pause() or 0)
        assert main(["thing"]) == 130
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "ampwise", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_reader_of_a_drawn_table_that_goes_away_is_no_error():
    """`ampwise advise | head -1`: rich ends the process when its output is closed."""
    pipe = f"{sys.executable} -m ampwise advise | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
