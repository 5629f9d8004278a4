"""``ampwise lint``: find mixed-precision mistakes in code, and mend what can be mended safely."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ampwise.cli.options import Shared, check_target, write_json, write_report
from ampwise.cli.output import say, tell, tell_json
from ampwise.errors import EXIT_GATE, EXIT_OK, EXIT_USAGE, UsageError, nearest

if TYPE_CHECKING:
    from ampwise_lint.findings import LintReport
    from ampwise_lint.settings import Settings

Format = Literal["text", "json", "github", "sarif"]
Many = tyro.conf.UseAppendAction


@dataclass
class Options(Shared):
    """Find mixed-precision mistakes in Python files, folders and notebooks. Executes nothing.

    Exit codes: 0 all files read and nothing found; 1 findings; 2 no findings, but a file could not
    be read or parsed, or there was none.
    """

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

    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the findings as a page to this file, too."""

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
    from ampwise_lint import baseline
    from ampwise_lint.settings import load_settings

    if options.explain is not None:
        return _explain(options.explain)
    if options.jobs < 0:
        raise UsageError(f"jobs: expected 0 or more, got {options.jobs}")
    check_target("html", options.html)
    paths = options.paths or (Path(),)
    settings = load_settings(_first_folder(paths)).with_flags(
        options.select, options.ignore, options.exclude, options.baseline
    )
    report = _checked(options, paths, settings)
    if options.write_baseline is not None:
        baseline.write(report, settings, options.write_baseline)
        unread = f"; {len(report.skipped)} files not read" if report.skipped else ""
        known = f"{len(report.findings)} known findings{unread}"
        tell(f"{options.write_baseline}: {known}", err=True)
        return EXIT_USAGE if report.skipped else EXIT_OK
    if settings.baseline is not None:
        baseline.drop_known(report, settings, settings.baseline)
    _report(options, report)
    if options.html is not None:
        from ampwise.report.lint import to_html

        write_report(to_html(report), options.html)
    write_json(json.dumps(report.to_json(), indent=2), options.json)
    if report.findings:
        return EXIT_GATE
    return EXIT_USAGE if report.skipped else EXIT_OK


def _first_folder(paths: tuple[Path, ...]) -> Path:
    first = paths[0]
    return first if os.path.isdir(first) else first.parent  # noqa: PTH112 - a name of any length


def _checked(options: Options, paths: tuple[Path, ...], settings: Settings) -> LintReport:
    """Check the files, mend them where asked, and check them again."""
    from ampwise.cli.progress import Line
    from ampwise_lint.engine import find, lint
    from ampwise_lint.fix import fix_files

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
    for each in mended.refused:
        say(f"error: cannot write {each.path}: {each.reason}")
    report = check()
    report.fixed = sum(mended.files.values())
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
    from ampwise.report.lint import explain
    from ampwise_lint.rule import all_rules

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
