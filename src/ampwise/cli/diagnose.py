"""``ampwise diagnose``: train until a step goes wrong, then say where, why, and what mends it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.cli.options import Common, positive, write_json
from ampwise.errors import EXIT_GATE, EXIT_OK

if TYPE_CHECKING:
    from rich.console import Console

    from ampwise.cli.progress import Line
    from ampwise.numerics.result import Diagnosis


@dataclass
class Options(Common):
    """Find where and why a precision fails: operation, module, line, cause, fixes by replay."""

    precision: str = "fp16"
    """Precision to examine, used as asked even where it is emulated."""

    steps: int = 50
    """Steps to make when none goes wrong; the last is then compared with float64."""

    budget: float = 60.0
    """Seconds after which no further step is begun."""

    accumulate: int = 1
    """Micro-batches in an accumulation window."""

    max_grad_norm: float | None = None
    """Clip the gradient norm to this."""


def run(options: Options) -> int:
    """Train, examine, print, write ``diagnosis.json`` and ``report.html``; the exit code."""
    for name in ("steps", "budget", "accumulate", "max_grad_norm"):
        positive(name.replace("_", "-"), getattr(options, name))

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from rich.console import Console

    from ampwise.bench.arm import Settings
    from ampwise.cli.bench import device_of
    from ampwise.cli.progress import Line
    from ampwise.numerics.diagnose import DiagnoseConfig, run_diagnosis
    from ampwise.policy import Policy
    from ampwise.report.diagnosis import render_cause, render_fixes
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder

    policy = Policy.parse(options.precision)
    settings = Settings(
        device_of(options.device), options.seed, options.accumulate, options.max_grad_norm
    )
    task = load_task(options.task, options.settings())
    folder = RunFolder.create(options.out, f"diagnose-{task.name or 'task'}", print)
    console = None if options.json == "-" else Console()
    line = Line(quiet=options.quiet)
    shown = _Shown(line, console)
    try:
        found = run_diagnosis(
            task, DiagnoseConfig(policy, settings, options.steps, options.budget), shown
        )
    finally:
        line.clear()
    if console is not None:
        if not shown.cause:
            render_cause(found, console)
        render_fixes(found, console)
    store(found, folder)
    if console is not None:
        print(f"\nreport: {folder.path / 'diagnosis.json'} and {folder.path / 'report.html'}")
    write_json(json.dumps(found.to_json(), indent=2, allow_nan=False), options.json)
    return EXIT_GATE if found.status == "fault" else EXIT_OK


def store(found: Diagnosis, folder: object) -> None:
    """Write ``diagnosis.json``, ``report.html`` and ``run.json``."""
    from ampwise.report.diagnosis import to_html
    from ampwise.telemetry.files import atomic_write_text
    from ampwise.telemetry.run import RunFolder

    assert isinstance(folder, RunFolder)
    text = json.dumps(found.to_json(), indent=2, allow_nan=False)
    atomic_write_text(folder.path / "diagnosis.json", text + "\n")
    atomic_write_text(folder.path / "report.html", to_html(found))
    folder.write({"command": "diagnose", "task": found.task, "status": found.status})
    folder.close()


class _Shown:
    """Shows the cause as soon as it is known."""

    def __init__(self, line: Line, console: Console | None) -> None:
        self._line, self._console = line, console
        self.cause = False

    def step(self, number: int, planned: int, loss: float) -> None:
        self._line.show(f"step {number} of at most {planned}, loss {loss:.4f}")

    def stage(self, what: str) -> None:
        self._line.show(what, now=True)

    def found(self, diagnosis: Diagnosis) -> None:
        from ampwise.report.diagnosis import render_cause

        if self._console is not None:
            self._line.clear()
            render_cause(diagnosis, self._console)
            self.cause = True
