"""MLflow: a SQLite store in the run folder, unless MLFLOW_TRACKING_URI names a server.

Metrics are handed over in batches: one database transaction a step would cost more than the step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric as MlflowMetric
from mlflow.entities import Param, RunTag
from mlflow.tracking import MlflowClient

from ampwise.telemetry.names import Metric

_BATCH = 500  # metrics; the server's limit for one request is 1000
_LONGEST = 500


class _Mlflow:
    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name("ampwise")
        experiment = found.experiment_id if found else self._client.create_experiment("ampwise")
        self._run = self._client.create_run(experiment, run_name=run_name).info.run_id
        params = [Param(_known(key), str(value)[:_LONGEST]) for key, value in config.items()]
        self._client.log_batch(self._run, params=params)
        self._waiting: list[MlflowMetric] = []
        self._words: dict[str, str] = {}

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Numbers become metrics, words (the precision) tags."""
        now_ms = int(time.time() * 1000)
        for name, value in metrics.items():
            known = _known(name)
            if isinstance(value, str):
                self._words[known] = value
            else:
                self._waiting.append(MlflowMetric(known, float(value), now_ms, step))
        if len(self._waiting) >= _BATCH:
            self._send()

    def finish(self) -> None:
        """Send the rest and end the run."""
        self._send()
        self._client.set_terminated(self._run)

    def _send(self) -> None:
        tags = [RunTag(name, value) for name, value in self._words.items()]
        waiting, self._waiting, self._words = self._waiting, [], {}
        for start in range(0, max(1, len(waiting)), _BATCH):
            self._client.log_batch(self._run, metrics=waiting[start : start + _BATCH], tags=tags)
            tags = []


def _known(name: str) -> str:
    """A name as MLflow takes it: one with other characters would cost a run all its metrics."""
    return re.sub(r"[^\w./ :-]", "_", name)


def start(folder: Path, run_name: str, config: Mapping[str, Any]) -> _Mlflow:
    """Start an MLflow run."""
    return _Mlflow(folder, run_name, config)
