"""``ampwise report``: show a stored bench run again, in any form, or compare two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ampwise.cli.options import Gate, Shared, write_json
from ampwise.errors import EXIT_GATE, EXIT_OK, UsageError

if TYPE_CHECKING:
    from ampwise.bench.result import BenchReport

Format = Literal["terminal", "json", "markdown", "html"]


@dataclass
class Options(Shared):
    """Show a stored bench run again, or compare two of one task, the older first."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN]")] = ()
    """Run folder, or its bench.json."""

    format: Format = "terminal"
    """What to write; html goes to report.html in the run folder unless --out says otherwise."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write instead of standard output."""

    gate: Gate = "off"
    """Exit with 1 on a failed requirement or, with two runs, on a regression; "strict": also on
    one that is not measured."""


def run(options: Options) -> int:
    """Load, render; the exit code."""
    if len(options.runs) not in (1, 2):
        raise UsageError(
            f"expected one RUN, or two to compare, got {len(options.runs)}; for example "
            "ampwise report runs/bench-digits-1"
        )
    reports = [_load(each) for each in options.runs]
    if len(reports) == 2:
        return _compare(options, reports[0], reports[1])
    report, text = reports[0], None
    if options.format == "html":
        from ampwise.report.html import to_html

        _save(to_html(report), options.out or _folder(options.runs[0]) / "report.html")
    elif options.format == "markdown":
        from ampwise.report.markdown import to_markdown

        text = to_markdown(report).rstrip("\n")
    elif options.format == "json":
        text = json.dumps(report.to_json(), indent=2, allow_nan=False)
    elif options.json != "-":
        from rich.console import Console

        from ampwise.report.bench import render

        render(report, Console())
    if text is not None and options.out is not None:
        _save(text + "\n", options.out)
    elif text is not None:
        print(text)
    write_json(json.dumps(report.to_json(), indent=2, allow_nan=False), options.json)
    from ampwise.cli.bench import gate_exit_code

    return gate_exit_code(report, options.gate)


def _compare(options: Options, before: BenchReport, after: BenchReport) -> int:
    from rich.console import Console

    from ampwise.report.compare import compare, render

    if options.format not in ("terminal", "json"):
        raise UsageError(f"format {options.format}: two runs compare as terminal or json")
    found = compare(before, after, (str(options.runs[0]), str(options.runs[1])))
    text = json.dumps(found.to_json(), indent=2)
    if options.format == "json":
        print(text)
    elif options.json != "-":
        render(found, Console())
    write_json(text, options.json)
    return EXIT_GATE if options.gate != "off" and found.regressions else EXIT_OK


def _load(path: Path) -> BenchReport:
    """A stored report.

    Raises
    ------
    UsageError
        When there is none, or it is damaged.
    """
    from ampwise.bench.result import BenchReport

    file = path / "bench.json" if path.is_dir() else path
    if (path / "run.json").exists() and not file.exists():
        raise UsageError(f"{path} holds no finished bench run, and only those can be shown")
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}; expected the folder of a bench run, such as "
            "runs/bench-digits-1"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: expected a bench report, got a {type(content).__name__}")
    try:
        return BenchReport.from_json(content)  # pyright: ignore[reportUnknownArgumentType]
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _save(text: str, path: Path) -> None:
    from ampwise.telemetry.files import atomic_write_text

    did = "replaced" if path.exists() else "wrote"
    try:
        atomic_write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {path}: {error.strerror}; name another file with --out"
        ) from None
    print(f"{did} {path}")
