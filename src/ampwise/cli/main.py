"""The ``ampwise`` command: finds the subcommand, parses its options, and is where every error ends.

Only the chosen command's module is imported, and ``ampwise --help`` imports none, so that it
answers at once. Errors become one line on stderr and an exit code (see `ampwise.errors`);
``--debug`` shows where they came from.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import ampwise
from ampwise import errors
from ampwise.distributed.launch import is_lost, launch
from ampwise.errors import AmpwiseError, UsageError, nearest
from ampwise_lint.base import neutral
from ampwise_lint.base.ending import fail, on_sigterm
from ampwise_lint.base.output import lasting_output, say, tell, tell_text
from ampwise_lint.base.results import check_target

COMMANDS = {
    "bench": "every precision side by side: speed, memory, verdict (the main job)",
    "verify": "every requirement on a task: measured, score; PASS, BLOCK or UNDECIDED",
    "diagnose": "where and why a precision fails: operation, line, cause, fixes tried on the step",
    "tune": "modules that must stay in float32; the fastest or smallest way to train",
    "lint": "find mixed-precision mistakes in code, and fix them; executes nothing",
    "report": "show a stored run again (terminal, JSON, Markdown, HTML), or compare two",
    "run": "a training script nobody changed, observed: what its precision really did",
    "train": "train a task with a precision policy: checkpoints, resume, trackers",
    "advise": "what this machine's devices do in each format, measured, and what to pick",
}
"""Commands, each a module of this package but the linter's, and a line about each."""

_ON_ALL_RANKS = ("train", "bench", "diagnose", "run")
"""Commands in which every process takes part that torchrun started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with lasting_output() as output:
        code = _exit_code(arguments)
        output.flush()
        if output.complaint:
            code = _fail(output.complaint, errors.EXIT_RUN)
    if code and _in_a_group() and arguments[:1] != ["run"]:  # a script leaves as it does by itself
        _leave(code)
    return code


def _in_a_group() -> bool:
    """Whether this process belongs to a process group still, as after an error."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def _leave(code: int) -> NoReturn:
    """End this process at once, where others may be waiting for it.

    Taking down a process group waits for what is pending in it, and that may be waiting for a
    process that waits for this one; a closed connection tells them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    """Run a command line; every error ends here, as one line and a code."""
    debug = False
    try:
        arguments, debug = _without_debug(arguments)
        # SIGTERM as Ctrl-C: what a run has so far is saved by the same code.
        with on_sigterm(signal.default_int_handler):
            return _dispatch(arguments)
    except KeyboardInterrupt as interruption:
        if not launch().leads:  # all are interrupted together, and the first one says it
            return errors.EXIT_INTERRUPTED
        return _fail("interrupted" + _saved(interruption), errors.EXIT_INTERRUPTED)
    except SystemExit as leaving:
        return _fail(f"the task called sys.exit({leaving.code!r})", errors.EXIT_USAGE)
    except Exception as error:  # noqa: BLE001 - the one place where every error ends
        if debug:
            tell_text(traceback.format_exc(), err=True)
        return _explain(error, debug=debug)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The command line without ``--debug``, and whether it was there; a script's own stays."""
    if arguments[:1] == ["run"]:
        return arguments, "--debug" in _split(arguments)[0]
    return [each for each in arguments if each != "--debug"], "--debug" in arguments


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """``ampwise run``'s own words, and from the script on the script's."""
    from ampwise.cli.run import script_at

    place = 1 + script_at(arguments[1:])
    return arguments[:place], arguments[place:]


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        tell_text(_overview())
        return errors.EXIT_OK
    if arguments[0] in ("-V", "--version"):
        tell(f"ampwise {ampwise.__version__}")
        return errors.EXIT_OK
    name, *rest = arguments
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        legal = ("--help", "--version") if what == "option" else COMMANDS
        raise UsageError(
            f"unknown {what} {name!r}: expected one of {', '.join(legal)}{nearest(name, legal)}"
        )
    me = launch()
    if me.size > 1 and name not in _ON_ALL_RANKS:
        if not me.leads:
            return errors.EXIT_OK
        say(f"{name}: one process does this; the others have nothing to do")
    if name == "lint":  # of another distribution, which has a parser of its own
        from ampwise_lint.command import command

        return command(rest, "ampwise lint")
    module = importlib.import_module(f"ampwise.cli.{name}")
    from ampwise.cli.parsing import parse

    theirs: list[str] = []
    if name == "run":
        (_, *rest), theirs = _split(arguments)
    options = parse(module.Options, rest, f"ampwise {name}")
    if options is None:
        return errors.EXIT_OK
    if name == "run":
        options.script = tuple(theirs)
    check_target("json", getattr(options, "json", None))
    return module.run(options)


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
    """One line about an error, and its exit code; one that left results behind is a failed run."""
    message, code = _words(error, debug=debug)
    if _said_elsewhere(error):
        return code
    saved = _saved(error)
    return _fail(message + saved, errors.EXIT_RUN if saved else code)


def _said_elsewhere(error: Exception) -> bool:
    """Whether another process has the same error, and says it.

    The first one; before they have met, the first on each machine, whose files they all see.
    """
    met = hasattr(error, "__ampwise_said__")
    return met or (isinstance(error, UsageError) and not _in_a_group() and launch().local_rank > 0)


def _saved(error: BaseException) -> str:
    """Where a command put what it had, for the end of the line."""
    place = getattr(error, "__ampwise_saved__", None)
    return "" if place is None else neutral.line(f"; what there was is in {place}")


def _words(error: Exception, *, debug: bool) -> tuple[str, int]:
    if isinstance(error, AmpwiseError):
        return errors.explained(error, debug=debug)
    if errors.is_out_of_memory(error):
        remedy = "use smaller batches with --accumulate, or a lower precision"
        return f"out of memory: {remedy} ({errors.in_one_line(error)})", errors.EXIT_RUN
    if _in_a_group() and is_lost(error):
        return "another process of this run is gone; it says why", errors.EXIT_RUN
    if hasattr(error, "__ampwise_user__"):
        return _users_words(error, debug=debug), errors.EXIT_USAGE
    return errors.explained(error, debug=debug)


def _users_words(error: Exception, *, debug: bool) -> str:
    """An error of the task's own code: its traceback without our frames, printed."""
    if not debug:
        own = os.path.dirname(ampwise.__file__)  # noqa: PTH120 - compared with frame file names
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not each.filename.startswith(own)]
        tell("Traceback (most recent call last):", err=True)
        for each in (*traceback.format_list(theirs), *traceback.format_exception_only(error)):
            tell_text(each, err=True)
    where: Any = getattr(error, "__ampwise_user__", "the task")
    return neutral.line(f"{where} raised {type(error).__name__}")


def _fail(message: str, code: int) -> int:
    who = f"rank {rank}: " if (rank := os.environ.get("RANK", "0")) != "0" else ""
    return fail(f"{who}{message}", code)
