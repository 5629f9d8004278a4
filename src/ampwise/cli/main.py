"""The ``ampwise`` command: finds the subcommand, parses its options, and is where every error ends.

Only the chosen command's module is imported, and ``ampwise --help`` imports none, so that it
answers at once. Errors become one line on stderr and an exit code (see `ampwise.errors`);
``--debug`` shows where they came from.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import ampwise
from ampwise import errors
from ampwise.errors import AmpwiseError, UsageError, nearest

COMMANDS = {
    "bench": "every precision side by side: speed, memory, verdict (the main job)",
    "train": "train a task with a precision policy: checkpoints, resume, trackers",
    "advise": "what this machine's devices do in each format, measured, and what to pick",
}
"""Commands, each a module of this package, and a line about each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = _dispatch([each for each in arguments if each != "--debug"])
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", errors.EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, say) has gone: no error of ours. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_OK
    except Exception as error:  # noqa: BLE001 - the one place where every error ends
        if debug:
            traceback.print_exc()
        return _explain(error, debug=debug)
    return code


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
    if hasattr(error, "__ampwise_user__"):
        return _explain_users(error, debug=debug)
    if type(error).__name__ == "OutOfMemoryError":
        return _fail(
            "out of memory on the device: use a smaller batch with --accumulate, or a lower "
            f"precision ({_first_line(error)})",
            errors.EXIT_RUN,
        )
    if isinstance(error, OSError):
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}", errors.EXIT_RUN)
    hint = "" if debug else "; --debug shows where"
    return _fail(
        f"{type(error).__name__}: {_first_line(error)} (this is a bug in ampwise{hint})",
        errors.EXIT_RUN,
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
