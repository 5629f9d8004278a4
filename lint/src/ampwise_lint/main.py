"""The ``ampwise-lint`` command: runs a command line, and is where every error ends."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence

from ampwise_lint.base.ending import fail, on_sigterm
from ampwise_lint.base.errors import EXIT_INTERRUPTED, EXIT_RUN, explained
from ampwise_lint.base.output import lasting_output, tell_text
from ampwise_lint.command import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with lasting_output() as output:
        code = _exit_code(arguments)
        output.flush()
        if output.complaint:
            code = fail(output.complaint, EXIT_RUN)
    return code


def _exit_code(arguments: list[str]) -> int:
    """Run a command line; every error ends here, as one line and a code."""
    debug = "--debug" in arguments
    try:
        # SIGTERM as Ctrl-C: a file that is being mended is not left half written aside.
        with on_sigterm(signal.default_int_handler):
            return command(arguments, "ampwise-lint")
    except KeyboardInterrupt:
        return fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the one place where every error ends
        if debug:
            tell_text(traceback.format_exc(), err=True)
        return fail(*explained(error, debug=debug))
