"""Experiment trackers, one a file, imported when started. None of them can stop training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ampwise.errors import MissingExtraError, UsageError, in_one_line, nearest
from ampwise.installation import extra_command
from ampwise.telemetry.names import Metric
from ampwise_lint.base import neutral

TRACKERS = ("wandb", "tensorboard", "mlflow", "csv")
"""What ``--track`` takes; each is a module of this package."""


class Tracker(Protocol):
    """A backend that was started."""

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Record a step's metrics by name."""

    def finish(self) -> None:
        """Hand everything over and close."""


class TrackerSet:
    """Several trackers as one; one that raises is reported once and switched off.

    Parameters
    ----------
    names
        Which ones.
    folder
        The run's folder; what is written locally goes below it.
    run_name
        What the run is called.
    config
        Plain values about the run.
    report
        Told once about each tracker that fails.

    Raises
    ------
    UsageError
        For a name that is no tracker.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        check_names(names)
        self._report = report
        self._running: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            self._guarded(
                name,
                lambda name=name: self._start(
                    name, folder, neutral.line(run_name), neutral.values(config)
                ),
            )

    @property
    def names(self) -> list[str]:
        """Those that are running."""
        return list(self._running)

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Record a step's metrics with every running tracker; their names as lines."""
        metrics = neutral.values(metrics)
        for name, tracker in list(self._running.items()):
            self._guarded(name, lambda tracker=tracker: tracker.log(metrics, step))

    def finish(self) -> None:
        """Close every running tracker."""
        for name, tracker in list(self._running.items()):
            self._guarded(name, tracker.finish)
        self._running.clear()

    def _start(self, name: str, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            module = importlib.import_module(f"ampwise.trackers.{name}_tracker")
            self._running[name] = module.start(folder, run_name, config)
        except ImportError as error:
            raise MissingExtraError(f"not installed ({error}): {extra_command(name)}") from error

    def _guarded(self, name: str, act: Callable[[], object]) -> None:
        """Training must outlive its trackers, whatever they raise."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a client may raise anything; it is reported
            self._running.pop(name, None)
            self._report(f"tracker {name} is off, training goes on: {in_one_line(error)}")


def check_names(names: Sequence[str]) -> None:
    """Refuse a name that is no tracker."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"track: unknown tracker {name!r}: expected one of {', '.join(TRACKERS)}"
                f"{nearest(name, TRACKERS)}"
            )
