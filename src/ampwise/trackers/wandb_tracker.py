"""Weights & Biases, online or offline as WANDB_MODE says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from ampwise.telemetry.names import Metric


class _Wandb:
    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._run = wandb.init(
            project="ampwise",
            name=run_name,
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """One history row; W&B wants steps that never go back, which ours do not."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until everything is written or uploaded."""
        self._run.finish()


def start(folder: Path, run_name: str, config: Mapping[str, Any]) -> _Wandb:
    """Start a W&B run."""
    return _Wandb(folder, run_name, config)
