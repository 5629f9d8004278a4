"""TensorBoard event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ampwise.telemetry.names import Metric


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", "  \n".join(f"{k}: {v}" for k, v in config.items()))
        self._words: dict[str, str] = {}

    def log(self, metrics: Mapping[str, Metric], step: int) -> None:
        """A scalar each; words (the precision) once, and again when they change."""
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
            elif self._words.get(name) != value:
                self._words[name] = value
                self._writer.add_text(name, value, step)

    def finish(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def start(folder: Path, run_name: str, config: Mapping[str, Any]) -> _TensorBoard:  # noqa: ARG001
    """Open an event file below the run folder."""
    return _TensorBoard(folder, config)
