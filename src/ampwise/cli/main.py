"""The ``ampwise`` command: finds the subcommand, parses its options, and is where every error ends.

Only the chosen command's module is imported, and ``ampwise --help`` imports none, so that it
answers at once. Errors become one line on stderr and an exit code (see `ampwise.errors`);
``--debug`` shows where they came from.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import ampwise
from ampwise import errors
from ampwise.errors import AmpwiseError, UsageError, nearest

COMMANDS = {
    "bench": "every precision side by side: speed, memory, verdict (the main job)",
    "verify": "every requirement of mixed precision on a task: measured, score, PASS or BLOCK",
    "diagnose": "where and why a precision fails: operation, line, cause, fixes tried on the step",
    "tune": "the fewest modules that must stay in float32, and the fastest policy that holds",
    "lint": "find mixed-precision mistakes in code, and fix them; executes nothing",
    "report": "show a stored run again (terminal, JSON, Markdown, HTML), or compare two",
    "train": "train a task with a precision policy: checkpoints, resume, trackers",
    "advise": "what this machine's devices do in each format, measured, and what to pick",
}
"""Commands, each a module of this package, and a line about each."""


_WRONG_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOENT}
"""Failures of the file system that another path mends; a full disk is none of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        with _sigterm_interrupts():
            code = _dispatch([each for each in arguments if each != "--debug"])
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", errors.EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, say) has gone: no error of ours. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_OK
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich leaves so, its output closed
            return errors.EXIT_OK
        return _fail(f"the task called sys.exit({leaving.code!r})", errors.EXIT_USAGE)
    except Exception as error:  # noqa: BLE001 - the one place where every error ends
        if debug:
            traceback.print_exc()
        return _explain(error, debug=debug)
    return code


@contextmanager
def _sigterm_interrupts() -> Generator[None]:
    """SIGTERM as Ctrl-C: what a run has so far is saved by the same code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return errors.EXIT_OK
    if arguments[0] in ("-V", "--version"):
        print(f"ampwise {ampwise.__version__}")
        return errors.EXIT_OK
    name, *rest = arguments
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        legal = ("--help", "--version") if what == "option" else COMMANDS
        raise UsageError(
            f"unknown {what} {name!r}: expected one of {', '.join(legal)}{nearest(name, legal)}"
        )
    module = importlib.import_module(f"ampwise.cli.{name}")
    from ampwise.cli.parsing import parse

    options = parse(module.Options, rest, f"ampwise {name}")
    return module.run(options) if options is not None else errors.EXIT_OK


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: ampwise COMMAND [TASK] [OPTIONS]\n\n"
        "Mixed-precision training for PyTorch that proves itself.\n\n"
        f"commands:\n{commands}\n\n"
        "TASK is charlm (default), digits, text:PATH, file.py[:function] or module[:function].\n"
        "ampwise COMMAND --help shows a command's options; ampwise --version the version."
    )


def _explain(error: Exception, *, debug: bool) -> int:
    """One line about an error, and its exit code."""
    if isinstance(error, AmpwiseError):
        return _fail(str(error), error.exit_code)
    if _out_of_memory(error):
        return _fail(
            f"out of memory: use smaller batches with --accumulate, or a lower precision "
            f"({_first_line(error)})",
            errors.EXIT_RUN,
        )
    if hasattr(error, "__ampwise_user__"):
        return _explain_users(error, debug=debug)
    if isinstance(error, OSError):
        code = errors.EXIT_USAGE if error.errno in _WRONG_PLACE else errors.EXIT_RUN
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}", code)
    hint = "" if debug else "; --debug shows where"
    return _fail(
        f"{type(error).__name__}: {_first_line(error)} (this is a bug in ampwise{hint})",
        errors.EXIT_RUN,
    )


def _out_of_memory(error: Exception) -> bool:
    """Whether a device or the machine ran out of memory; asked by name, without loading torch."""
    # torch.OutOfMemoryError comes from devices; the CPU's allocator raises a bare RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def _explain_users(error: Exception, *, debug: bool) -> int:
    """An error of the task's own code: its traceback without our frames."""
    if not debug:
        own = os.path.dirname(ampwise.__file__)  # noqa: PTH120 - compared with frame file names
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not each.filename.startswith(own)]
        print("Traceback (most recent call last):", file=sys.stderr)
        print("".join(traceback.format_list(theirs)), end="", file=sys.stderr)
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
    where: Any = getattr(error, "__ampwise_user__", "the task")
    return _fail(f"{where} raised {type(error).__name__}", errors.EXIT_USAGE)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _fail(message: str, code: int) -> int:
    print(
        f"ampwise: {'' if code == errors.EXIT_INTERRUPTED else 'error: '}{message}", file=sys.stderr
    )
    return code
