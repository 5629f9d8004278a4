"""``ampwise advise``: what this machine's devices do in each format, measured, and what to pick."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ampwise.cli.options import Shared
from ampwise_lint.base.results import write_json


@dataclass
class Options(Shared):
    """Show what each device does natively in each format, measured, and what to pick."""

    device: str | None = None
    """Look at this device only (cpu, cuda, cuda:1, mps, xpu); default: every device present."""

    refresh: bool = False
    """Measure anew instead of using an earlier measurement, and have steps raced anew, too."""

    json: str | None = None
    """Write the report as JSON to this file; - for standard output, and nothing else there."""


def run(options: Options) -> int:
    """Probe, print, and return the exit code."""
    from ampwise.advice import advise
    from ampwise.errors import EXIT_OK
    from ampwise.report.advise import render
    from ampwise_lint.base.console import Console

    report = advise(options.device, refresh=options.refresh)
    if options.json != "-":
        render(report, Console())
    write_json(json.dumps(report.to_json(), indent=2), options.json)
    return EXIT_OK
