"""``ampwise advise``: what this machine's devices do in each format, measured, and what to pick."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass


@dataclass
class Options:
    """Show what each device does natively in each format, measured, and what to pick."""

    device: str | None = None
    """Look at this device only (cpu, cuda, cuda:1, mps, xpu); default: every device present."""

    refresh: bool = False
    """Measure anew instead of using an earlier measurement."""

    json: str | None = None
    """Write the report as JSON to this file; - for standard output, and nothing else there."""


def run(options: Options) -> int:
    """Probe, print, and return the exit code."""
    from rich.console import Console

    from ampwise.advice import advise
    from ampwise.errors import EXIT_OK
    from ampwise.report.advise import render

    report = advise(options.device, refresh=options.refresh)
    if options.json == "-":
        print(json.dumps(report.to_json(), indent=2))
        return EXIT_OK
    render(report, Console())
    if options.json is not None:
        _write(options.json, json.dumps(report.to_json(), indent=2))
    return EXIT_OK


def _write(path: str, text: str) -> None:
    """Write a report file, and say whether one was there before."""
    from pathlib import Path

    from ampwise.errors import UsageError

    file = Path(path)
    did = "replaced" if file.exists() else "wrote"
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {path}: {error.strerror}; name a writable file"
        ) from None
    print(f"{did} {path}", file=sys.stderr)
