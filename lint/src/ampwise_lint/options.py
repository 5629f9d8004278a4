"""The command line: a table of options, and the parser that is made of it.

Whatever does not fit is a `UsageError` of one line. The parser is argparse's, since this
distribution has to be small.
"""

from __future__ import annotations

import inspect
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from ampwise_lint import __version__
from ampwise_lint.base.errors import UsageError, nearest
from ampwise_lint.base.output import tell, tell_text

_VERSION = f"ampwise-lint {__version__}"

Format = Literal["text", "json", "github", "sarif"]


Argument = dict[str, Any]
"""What `ArgumentParser.add_argument` is told of an option."""


def _switch(words: str) -> Argument:
    return {"help": words, "action": "store_true"}


def _value(metavar: str, words: str, kind: Any = str) -> Argument:
    return {"help": words, "metavar": metavar, "type": kind}


def _several(metavar: str, words: str) -> Argument:
    return {"help": words, "metavar": metavar, "action": "append"}


@dataclass(frozen=True)
class Options:
    """Find mixed-precision mistakes in Python files, folders and notebooks. Executes nothing.

    Exit codes: 0 all files read and nothing found; 1 findings; 2 no findings, but a file
    could not be read or parsed, or there was none.
    """

    paths: Sequence[Path] = field(
        default=(),
        metadata={
            "help": "Files and folders to check; default: this folder.",
            "metavar": "PATH",
            "nargs": "*",
            "type": Path,
        },
    )
    fix: bool = field(
        default=False,
        metadata=_switch(
            "Mend in place what can be mended without changing what correct code does."
        ),
    )
    unsafe_fixes: bool = field(
        default=False,
        metadata=_switch("Mend, with --fix or alone, also where behaviour may change."),
    )
    format: Format = field(
        default="text",
        metadata=_value(
            "FORMAT",
            "How to report: text, json, github (annotations of a pull request), sarif.",
            Format,
        ),
    )
    json: str | None = field(
        default=None,
        metadata=_value(
            "FILE",
            "Write the result as JSON to this file; - for standard output, and nothing else there.",
        ),
    )
    html: Path | None = field(
        default=None,
        metadata=_value("FILE", "Write the findings as a page to this file, too.", Path),
    )
    statistics: bool = field(
        default=False,
        metadata=_switch("Show how often each rule fired instead of the findings."),
    )
    explain: str | None = field(
        default=None,
        metadata=_value("RULE", "Show what a rule means (its code or name), and nothing else."),
    )
    select: Sequence[str] = field(
        default=(),
        metadata=_several(
            "CODES",
            "Report only these rules: codes, their beginnings (AMP1) or names; may be repeated.",
        ),
    )
    ignore: Sequence[str] = field(
        default=(), metadata=_several("CODES", "Do not report these rules; may be repeated.")
    )
    exclude: Sequence[str] = field(
        default=(),
        metadata=_several(
            "PATTERN", "Do not read files and folders that fit this pattern; may be repeated."
        ),
    )
    baseline: Path | None = field(
        default=None,
        metadata=_value(
            "FILE", "Report only what this file of known findings does not hold.", Path
        ),
    )
    write_baseline: Path | None = field(
        default=None,
        metadata=_value("FILE", "Write all findings to this file as known, and succeed.", Path),
    )
    jobs: int = field(
        default=0,
        metadata=_value("N", "Processes to check files in; 0: one for each CPU.", int),
    )
    no_cache: bool = field(
        default=False,
        metadata=_switch("Check files anew that have not changed since they were checked."),
    )
    quiet: bool = field(
        default=False, metadata=_switch("No progress and no summary, only the findings.")
    )
    debug: bool = field(default=False, metadata=_switch("Show where an error came from."))


def parse(arguments: Sequence[str], program: str) -> Options | None:
    """The options in a command line; None when help or the version was asked for, and printed.

    Raises
    ------
    UsageError
        For an unknown option, or a value that does not fit.
    """
    parser = _parser(program)
    if {"-h", "--help"} & set(arguments):
        tell_text(parser.format_help())
        return None
    if "--version" in arguments:
        tell(_VERSION)
        return None
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, rest = parser.parse_known_intermixed_args(arguments[:end])
    if rest:
        spelling = rest[0].partition("=")[0]
        legal = [_flag(each.name) for each in fields(Options)]
        hint = nearest(spelling, legal) or f"; {program} --help lists the options"
        raise UsageError(f"unknown option {spelling}{hint}")
    chosen: dict[str, Any] = vars(given)
    chosen["paths"] = [*chosen.get("paths", ()), *map(Path, arguments[end + 1 :])]
    return Options(**chosen)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what argparse found, of its two kinds of errors that no type here raises."""
        flag, _, what = message.removeprefix("argument ").partition(": ")
        needs = what.startswith("expected")
        raise UsageError(f"{flag}: {'expected a value' if needs else 'takes no value'}")


def _parser(program: str) -> ArgumentParser:
    made = _Parser(
        prog=program,
        usage="%(prog)s [PATH ...] [OPTIONS]",
        description=inspect.getdoc(Options),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for each in fields(Options):
        settings = dict(each.metadata)
        if "nargs" in settings:
            made.add_argument(each.name, default=SUPPRESS, **settings)
            continue
        flag = _flag(each.name)
        if "type" in settings:
            settings["type"] = _reader(flag, settings["type"])
        made.add_argument(flag, default=SUPPRESS, **settings)
    words = "Show the version, and nothing else."
    made.add_argument("--version", action="version", version=_VERSION, help=words)
    return made


def _reader(flag: str, kind: Any) -> Callable[[str], Any]:
    """What makes a value of an option's word."""

    def read(word: str) -> Any:
        legal = get_args(kind)
        if legal and word not in legal:
            hint = nearest(word, legal)
            raise UsageError(f"{flag}: expected one of {', '.join(legal)}, got {word!r}{hint}")
        try:
            return word if legal else kind(word)
        except ValueError:
            raise UsageError(f"{flag}: expected an integer, got {word!r}") from None

    return read
