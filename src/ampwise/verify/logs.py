"""The loss scale of each step, read back from what trackers wrote, with their own readers."""

from __future__ import annotations

import csv
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
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

    client: Any = MlflowClient(f"sqlite:///{folder.resolve()}/mlflow.db")
    experiment = client.get_experiment_by_name("ampwise")
    run = client.search_runs([experiment.experiment_id], max_results=1)[0]  # the newest
    history = client.get_metric_history(run.info.run_id, names.LOSS_SCALE)
    return [each.value for each in sorted(history, key=lambda each: each.step)]


def _wandb(folder: Path) -> list[Any]:
    (file,) = folder.rglob("*.wandb")
    rows = wandb_history(file)
    return [
        float(row[names.LOSS_SCALE]) for _, row in sorted(rows.items()) if names.LOSS_SCALE in row
    ]


def wandb_history(file: Path, wait_s: float = 10.0) -> dict[int, dict[str, str]]:
    """What an offline W&B run file logged: by step, JSON text by name.

    W&B writes it in a process of its own, which on a busy machine may not be done yet when the run
    is: it is waited for the record that the run has ended, for so long.
    """
    until = time.monotonic() + wait_s
    while True:
        records = list(_wandb_records(file))
        ended = any(each.WhichOneof("record_type") == "exit" for each in records)
        if ended or time.monotonic() > until:
            break
        time.sleep(0.1)
    rows: dict[int, dict[str, str]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows.setdefault(int(items["_step"]), {}).update(items)
    return rows


def _wandb_records(file: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for data in _leveldb_records(file.read_bytes()[_WANDB_HEADER:]):
        record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data)
        yield record


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB, each record with checksum, length and type.

    One that is cut short ends it: the rest is not written yet.
    W&B puts a header of its own before the first block, which counts as part of it.
    """
    place, parts = 0, b""
    while place + 7 <= len(log):
        room = 32768 - (place + _WANDB_HEADER) % 32768
        if room < 7:  # a block's tail too short for a record's header
            place += room
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        if place + 7 + length > len(log):
            return
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@contextmanager
def own_stores() -> Generator[None]:
    """Inside, trackers write to the run's folder, whatever servers the environment names."""
    before = {name: os.environ.get(name) for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI")}
    os.environ["WANDB_MODE"] = "offline"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_WANDB_HEADER = 7

READERS: dict[str, Reader] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
