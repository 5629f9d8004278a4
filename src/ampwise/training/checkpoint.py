"""Checkpoints: one file each, whole or not there, and enough to go on bit for bit.

A checkpoint is written aside, synced and renamed, so that a kill or a full disk leaves the earlier
ones. It holds tensors and plain values only and is loaded with ``weights_only=True``. The last
`KEEP` stay; the oldest are removed only after a new one is finished.

The model's state is float32 also under ``bf16-master``, so a run can be resumed in any precision.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampwise.errors import CheckpointError, UsageError
from ampwise.step import TrainStep
from ampwise.telemetry.files import atomic_write

VERSION = 1
KEEP = 3
_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass
class Position:
    """Where a run is in its data.

    Attributes
    ----------
    epoch
        Epochs begun, from 0.
    batch
        Batches of the epoch already trained on.
    epoch_rng
        Random state when the epoch began, from which a shuffling loader draws its order.
    """

    epoch: int = 0
    batch: int = 0
    epoch_rng: dict[str, Any] | None = None


@dataclass(frozen=True)
class Trained:
    """The things whose state a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer
    step: TrainStep
    scheduler: LRScheduler | None = None


def save(folder: Path, trained: Trained, position: Position, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint of this moment, and remove the oldest.

    Raises
    ------
    CheckpointError
        When it cannot be written; earlier ones are untouched.
    """
    content = {
        "ampwise_checkpoint": VERSION,
        "step": trained.step.state_dict(),
        "model": trained.model.state_dict(),
        "optimizer": trained.optimizer.state_dict(),
        "scheduler": trained.scheduler.state_dict() if trained.scheduler else None,
        "rng": random_state(),
        "position": vars(position),
        "config": dict(config),
    }
    path = folder / f"step-{trained.step.steps:08d}.pt"
    try:
        atomic_write(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        kept = newest(folder)
        raise CheckpointError(
            f"cannot write checkpoint {path}: {' '.join(str(error).split())[:200]}; "
            f"{f'the last finished one is {kept}' if kept else 'there is no earlier one'}; free "
            "disk space, then --resume"
        ) from None
    for old in finished(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def finished(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the oldest first; what was written aside is not one."""
    return sorted(path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name))


def newest(folder: Path) -> Path | None:
    """The last finished checkpoint."""
    return next(reversed(finished(folder)), None)


def load(path: Path) -> dict[str, Any]:
    """What a checkpoint file holds.

    Raises
    ------
    CheckpointError
        When it is missing, damaged, not a checkpoint, or of another version.
    """
    others = [str(each) for each in reversed(finished(path.parent)) if each != path]
    instead = f"; try {others[0]}" if others else ""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}{instead}") from None
    except Exception as error:  # noqa: BLE001 - unpickling damage raises anything
        raise CheckpointError(
            f"checkpoint {path} is damaged ({type(error).__name__}){instead}"
        ) from None
    if not isinstance(content, dict) or "ampwise_checkpoint" not in content:
        raise CheckpointError(f"{path} is no checkpoint of ampwise{instead}")
    if content["ampwise_checkpoint"] != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has version {content['ampwise_checkpoint']}, this ampwise reads "
            f"version {VERSION}: use the ampwise that wrote it"
        )
    return content


def restore(content: Mapping[str, Any], trained: Trained) -> Position:
    """Put everything back as it was; where the run was in its data.

    Raises
    ------
    CheckpointError
        When the states do not fit the task's model or optimizer.
    """
    try:
        trained.model.load_state_dict(content["model"])
        trained.optimizer.load_state_dict(content["optimizer"])
        trained.step.load_state_dict(content["step"])
    except UsageError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"the checkpoint does not fit this task's model and optimizer: {' '.join(first[:2])}"
        ) from None
    if trained.scheduler is not None and content["scheduler"] is not None:
        trained.scheduler.load_state_dict(content["scheduler"])
    set_random_state(content["rng"])
    return Position(**content["position"])


def random_state() -> dict[str, Any]:
    """State of every generator a training loop may draw from."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "python": _python_state(),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to a `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, state["numpy_position"], 0, 0.0))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _python_state() -> tuple[int, list[int], float | None]:
    version, internal, gauss = random.getstate()
    return version, list(internal), gauss
