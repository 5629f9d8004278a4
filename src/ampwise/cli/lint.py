"""``ampwise lint``: find mixed-precision mistakes in code, and mend what can be mended safely."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ampwise.cli.options import Shared, write_json
from ampwise.cli.output import tell, tell_json
from ampwise.errors import EXIT_GATE, EXIT_OK, UsageError, nearest

if TYPE_CHECKING:
    from ampwise.lint.findings import LintReport
    from ampwise.lint.settings import Settings

Format = Literal["text", "json", "github", "sarif"]
Many = tyro.conf.UseAppendAction


@dataclass
class Options(Shared):
    """Find mixed-precision mistakes in Python files, folders and notebooks. Executes nothing."""

    paths: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[PATH ...]")
    ] = ()
    """Files and folders to check; default: this folder."""

    fix: bool = False
    """Mend in place what can be mended without changing what correct code does."""

    unsafe_fixes: bool = False
    """Mend, with --fix or alone, also where behaviour may change."""

    format: Format = "text"
    """How to report: text, json, github (annotations of a pull request), sarif."""

    statistics: bool = False
    """Show how often each rule fired instead of the findings."""

    explain: str | None = None
    """Show what a rule means (its code or name), and nothing else."""

    select: Annotated[tuple[str, ...], Many, tyro.conf.arg(metavar="CODES")] = ()
    """Report only these rules: codes, their beginnings (AMP1) or names; may be repeated."""

    ignore: Annotated[tuple[str, ...], Many, tyro.conf.arg(metavar="CODES")] = ()
    """Do not report these rules; may be repeated."""

    exclude: Annotated[tuple[str, ...], Many, tyro.conf.arg(metavar="PATTERN")] = ()
    """Do not read files and folders that fit this pattern; may be repeated."""

    baseline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Report only what this file of known findings does not hold."""

    write_baseline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all findings to this file as known, and succeed."""

    jobs: int = 0
    """Processes to check files in; 0: one for each CPU."""

    no_cache: bool = False
    """Check files anew that have not changed since they were checked."""

    quiet: bool = False
    """No progress and no summary, only the findings."""


def run(options: Options) -> int:
    """Check, mend, report; the exit code."""
    from ampwise.lint import baseline
    from ampwise.lint.settings import load_settings

    if options.explain is not None:
        return _explain(options.explain)
    if options.jobs < 0:
        raise UsageError(f"jobs: expected 0 or more, got {options.jobs}")
    paths = options.paths or (Path(),)
    settings = load_settings(_first_folder(paths)).with_flags(
        options.select, options.ignore, options.exclude, options.baseline
    )
    report = _checked(options, paths, settings)
    if options.write_baseline is not None:
        baseline.write(report, settings, options.write_baseline)
        tell(f"{options.write_baseline}: {len(report.findings)} known findings", err=True)
        return EXIT_OK
    if settings.baseline is not None:
        baseline.drop_known(report, settings, settings.baseline)
    _report(options, report)
    write_json(json.dumps(report.to_json(), indent=2), options.json)
    return EXIT_GATE if report.findings else EXIT_OK


def _first_folder(paths: tuple[Path, ...]) -> Path:
    first = paths[0]
    return first if first.is_dir() else first.parent


def _checked(options: Options, paths: tuple[Path, ...], settings: Settings) -> LintReport:
    """Check the files, mend them where asked, and check them again."""
    from ampwise.cli.progress import Line
    from ampwise.lint.engine import find, lint
    from ampwise.lint.fix import fix_files

    machine_reads = options.json == "-" or options.format != "text"
    line = Line(quiet=options.quiet or machine_reads)

    def progress(done: int, total: int) -> None:
        line.show(f"{done} of {total} files")

    def check() -> LintReport:
        try:
            return lint(
                paths,
                settings,
                jobs=options.jobs,
                use_cache=not options.no_cache,
                progress=progress if os.isatty(2) else None,
            )
        finally:
            line.clear()

    report = check()
    if not (options.fix or options.unsafe_fixes) or not report.findings:
        return report
    files = list(find(paths, settings))
    mended = fix_files(report, files, settings, unsafe=options.unsafe_fixes)
    report = check()
    report.fixed = sum(mended.values())
    return report


def _report(options: Options, report: LintReport) -> None:
    from ampwise.report import lint as shown

    if options.json == "-":
        return
    if options.statistics:
        shown.statistics(report)
    elif options.format == "json":
        tell_json(json.dumps(report.to_json(), indent=2))
    elif options.format == "github":
        shown.github(report)
    elif options.format == "sarif":
        tell_json(json.dumps(shown.to_sarif(report), indent=2))
    else:
        shown.render(report, summary=not options.quiet)


def _explain(word: str) -> int:
    """Print a rule's documentation."""
    from ampwise.lint.rule import all_rules
    from ampwise.report.lint import explain

    rules = all_rules()
    found = next((e for e in rules.values() if word.upper() == e.code or word == e.name), None)
    if found is None:
        legal = [*rules, *(each.name for each in rules.values())]
        raise UsageError(
            f"--explain {word!r}: expected a rule's code (AMP101 to AMP403) or name"
            f"{nearest(word.upper() if word.upper().startswith('AMP') else word, legal)}"
        )
    explain(found)
    return EXIT_OK
