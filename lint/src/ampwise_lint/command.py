"""What ``ampwise-lint`` and ``ampwise lint`` do: check, mend where asked, report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ampwise_lint import baseline
from ampwise_lint.base.errors import EXIT_GATE, EXIT_OK, EXIT_USAGE, UsageError, nearest
from ampwise_lint.base.output import say, tell, tell_json
from ampwise_lint.base.page import pages
from ampwise_lint.base.progress import Line
from ampwise_lint.base.results import check_target, write_json, write_report
from ampwise_lint.engine import find, lint
from ampwise_lint.findings import LintReport
from ampwise_lint.fix import fix_files
from ampwise_lint.options import Options, parse
from ampwise_lint.rules import all_rules
from ampwise_lint.settings import Settings, load_settings


def command(arguments: Sequence[str], program: str) -> int:
    """Run a command line of `program`; the exit code.

    Raises
    ------
    UsageError
        For whatever cannot be done as it was asked for.
    """
    options = parse(arguments, program)
    return EXIT_OK if options is None else run(options)


def run(options: Options) -> int:
    """Check, mend, report; the exit code."""
    if options.explain is not None:
        return _explain(options.explain)
    if options.jobs < 0:
        raise UsageError(f"jobs: expected 0 or more, got {options.jobs}")
    check_target("json", options.json)
    check_target("html", options.html)
    if options.html is not None:
        pages("ampwise_lint")  # what is missing for a page is said before the work
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
        from ampwise_lint.report import to_html

        write_report(to_html(report), options.html)
    write_json(json.dumps(report.to_json(), indent=2), options.json)
    if report.findings:
        return EXIT_GATE
    return EXIT_USAGE if report.skipped else EXIT_OK


def _first_folder(paths: Sequence[Path]) -> Path:
    first = paths[0]
    return first if os.path.isdir(first) else first.parent  # noqa: PTH112 - a name of any length


def _checked(options: Options, paths: Sequence[Path], settings: Settings) -> LintReport:
    """Check the files, mend them where asked, and check them again."""
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
    from ampwise_lint import report as shown

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
    from ampwise_lint.report import explain

    rules = all_rules()
    found = next((e for e in rules.values() if word.upper() == e.code or word == e.name), None)
    if found is None:
        legal = [*rules, *(each.name for each in rules.values())]
        raise UsageError(
            f"--explain {word!r}: expected a rule's code ({min(rules)} to {max(rules)}) or name"
            f"{nearest(word.upper() if word.upper().startswith('AMP') else word, legal)}"
        )
    explain(found)
    return EXIT_OK
