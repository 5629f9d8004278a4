"""The loss scale of each step, read back from what trackers wrote, with their own readers."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampwise.telemetry import names

Reader = Callable[[Path], list[Any]]


def _csv(folder: Path) -> list[Any]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(each["value"]) for each in rows if each["name"] == names.LOSS_SCALE]


def _tensorboard(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [each.value for each in events.Scalars(names.LOSS_SCALE)]


def _mlflow(folder: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
    client: Any = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ampwise")
    run = client.search_runs([experiment.experiment_id], max_results=1)[0]  # the newest
    history = client.get_metric_history(run.info.run_id, names.LOSS_SCALE)
    return [each.value for each in sorted(history, key=lambda each: each.step)]


READERS: dict[str, Reader] = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow}
"""W&B's offline file has no reader of its own: it is synchronised to a server first."""
