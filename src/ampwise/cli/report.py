"""``ampwise report``: show a stored run again, in any form, or compare two bench runs."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ampwise.cli.options import Gate, Shared
from ampwise.errors import EXIT_GATE, EXIT_OK, UsageError
from ampwise_lint.base.output import tell, tell_json, tell_text
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.report.stored import Forms, Run

Format = Literal["terminal", "json", "markdown", "html"]


@dataclass
class Options(Shared):
    """Show a stored run again, or compare two bench runs of one task, the older first."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN]")] = ()
    """Folder of a bench, verify, diagnose, tune, train or observed run, or its result file."""

    format: Format = "terminal"
    """What to write; html goes to report.html in the run folder unless --out says otherwise."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write instead of standard output."""

    gate: Gate = "off"
    """Exit with 1 on a failed requirement, a fault, a mistake that is an error or, with two runs, a
    regression; "strict": also on a requirement that is not measured, and on any finding."""


def run(options: Options) -> int:
    """Load, render; the exit code."""
    from ampwise.report.stored import forms_of, load
    from ampwise.telemetry.run import plain

    if len(options.runs) not in (1, 2):
        raise UsageError(
            f"expected one RUN, or two to compare, got {len(options.runs)}; for example "
            "ampwise report runs/bench-digits-1"
        )
    runs = [load(each) for each in options.runs]
    if len(runs) == 2:
        return _compare(options, runs[0], runs[1])
    found = runs[0]
    forms = forms_of(found)
    values = json.dumps(plain(found.to_json()), indent=2, allow_nan=False)
    if options.format == "html":
        _save(forms.to_html(found), options.out or _folder(options.runs[0]) / "report.html")
    elif options.out is not None:
        _save(_text(options.format, forms, found, values), options.out)
    else:
        _show(options, forms, found, values)
    write_json(values, options.json)
    return _gate(found, options.gate)


def _show(options: Options, forms: Forms, found: Run, values: str) -> None:
    """Write a run to standard output."""
    from ampwise_lint.base.console import Console

    if options.format == "markdown":
        tell_text(forms.to_markdown(found))
    elif options.format == "json":
        tell_json(values)
    elif options.json != "-":
        forms.render(found, Console())


def _text(form: Format, forms: Forms, found: Run, values: str) -> str:
    """What a file gets."""
    if form == "markdown":
        return forms.to_markdown(found)
    return values + "\n" if form == "json" else _drawn(forms, found)


def _drawn(forms: Forms, found: Run) -> str:
    """What the terminal would show, as plain text of 80 columns."""
    from ampwise_lint.base.console import Console

    paper = io.StringIO()
    forms.render(found, Console(file=paper, width=80))
    return paper.getvalue().strip("\n") + "\n"


def _gate(found: Run, gate: Gate) -> int:
    from ampwise.bench.result import BenchReport
    from ampwise.bench.scaling_report import ScalingReport
    from ampwise.numerics.result import Diagnosis
    from ampwise.report.observed import ObservedRun
    from ampwise.report.train import TrainedRun
    from ampwise.tune.result import Tuned

    if isinstance(found, BenchReport):
        from ampwise.cli.bench import gate_exit_code

        return gate_exit_code(found, gate)
    if isinstance(found, Diagnosis):
        return EXIT_GATE if gate != "off" and found.status == "fault" else EXIT_OK
    if isinstance(found, ObservedRun):
        from ampwise.cli.run import holds

        return EXIT_OK if holds(found.report, gate) else EXIT_GATE
    if isinstance(found, ScalingReport | TrainedRun | Tuned):
        if gate != "off":
            kinds = {ScalingReport: "scaling", TrainedRun: "train", Tuned: "tune"}
            kind = kinds[type(found)]
            raise UsageError(f"gate: a {kind} run has no requirements; name a bench or verify run")
        return EXIT_OK
    from ampwise.cli.verify import gate_exit_code as verified

    return verified(found, gate)


def _compare(options: Options, before: Run, after: Run) -> int:
    from ampwise.bench.result import BenchReport
    from ampwise.report.compare import compare, render
    from ampwise_lint.base.console import Console

    if not (isinstance(before, BenchReport) and isinstance(after, BenchReport)):
        raise UsageError("expected two bench runs to compare; other runs are shown one by one")
    if options.format not in ("terminal", "json"):
        raise UsageError(f"format {options.format}: two runs compare as terminal or json")
    found = compare(before, after, (str(options.runs[0]), str(options.runs[1])))
    text = json.dumps(found.to_json(), indent=2)
    if options.format == "json":
        tell_json(text)
    elif options.json != "-":
        render(found, Console())
    write_json(text, options.json)
    return EXIT_GATE if options.gate != "off" and found.regressions else EXIT_OK


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _save(text: str, path: Path) -> None:
    from ampwise_lint.base.files import atomic_write_text

    did = "replaced" if path.exists() else "wrote"
    try:
        atomic_write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {path}: {error.strerror}; name another file with --out"
        ) from None
    tell(f"{did} {path}")
