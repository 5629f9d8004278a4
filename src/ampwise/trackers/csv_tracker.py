"""``metrics.csv`` in the run folder: step, name, value; one line a metric.

Long rather than wide, because metrics come at different steps (evaluation) and a column that
appears later would mean rewriting the file.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampwise.telemetry.names import Metric


class _Csv:
    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.csv"
        started = path.exists()
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if not started:
            self._writer.writerow(["step", "name", "value"])

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """A line for each metric."""
        self._writer.writerows([step, name, value] for name, value in metrics.items())

    def finish(self) -> None:
        """Flush and close the file."""
        self._file.close()


def start(folder: Path, run_name: str, config: Mapping[str, Any]) -> _Csv:  # noqa: ARG001
    """Open the file; a resumed run appends."""
    return _Csv(folder)
