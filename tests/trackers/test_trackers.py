"""Each tracker with its real client, read back with that client's own reader."""

from __future__ import annotations

import csv
import sys
import threading
from pathlib import Path

import pytest

from ampwise.errors import UsageError
from ampwise.installation import extra_command
from ampwise.step import StepRecord
from ampwise.telemetry.names import metrics_of
from ampwise.trackers import TrackerSet
from ampwise.verify.logs import wandb_history

SCALES = [65536.0, 32768.0, 32768.0, 65536.0, 65536.0]
NUMBERS = {
    "train/loss", "train/lr", "train/samples_per_s", "amp/enabled", "amp/loss_scale",
    "amp/grad_norm", "amp/found_inf", "amp/skipped_total", "amp/scale_growths",
    "amp/scale_backoffs", "memory/peak_bytes",
}  # fmt: skip


def log_a_run(name: str, folder: Path) -> list[str]:
    """Five steps, the first skipped, and an evaluation; what was reported."""
    said: list[str] = []
    trackers = TrackerSet([name], folder, "run-1", {"task": "small", "seed": 0}, said.append)
    for step, scale in enumerate(SCALES, start=1):
        norm = float("inf") if step == 1 else 0.5
        record = StepRecord(step, 2.0 / step, scale, norm, step == 1, 1e-3, step == 1, 1, 1, 1)
        metrics = metrics_of(record, "fp16", enabled=True, samples_per_s=10.0, peak_bytes=7)
        trackers.log(metrics, step)
    trackers.log({"eval/accuracy": 0.9}, 5)
    trackers.finish()
    return said


def test_wandb_offline_run_file(tmp_path):
    assert log_a_run("wandb", tmp_path) == []
    (file,) = tmp_path.rglob("*.wandb")
    rows = wandb_history(file)
    assert [float(rows[step]["amp/loss_scale"]) for step in range(1, 6)] == SCALES
    assert NUMBERS | {"amp/precision"} <= rows[2].keys()
    assert float(rows[5]["eval/accuracy"]) == 0.9


def test_a_wandb_run_file_is_read_when_it_is_whole(tmp_path):
    """The process that writes it may be behind; of one that was killed, what there is."""
    log_a_run("wandb", tmp_path)
    (file,) = tmp_path.rglob("*.wandb")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert len(wandb_history(file, wait_s=0.0)) < 5
    late = threading.Timer(0.3, file.write_bytes, [whole])
    late.start()
    assert len(wandb_history(file)) == 5
    late.join()


def test_tensorboard_event_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert log_a_run("tensorboard", tmp_path) == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scale = events.Scalars("amp/loss_scale")
    assert [(each.step, each.value) for each in scale] == list(enumerate(SCALES, start=1))
    assert set(events.Tags()["scalars"]) == NUMBERS | {"eval/accuracy"}
    assert "amp/precision/text_summary" in events.Tags()["tensors"]


def test_mlflow_sqlite_store(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert log_a_run("mlflow", tmp_path) == []
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("ampwise")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "amp/loss_scale")
    assert [(each.step, each.value) for each in history] == list(enumerate(SCALES, start=1))
    assert set(run.data.metrics) == NUMBERS | {"eval/accuracy"}
    assert run.data.tags["amp/precision"] == "fp16"
    assert run.data.params["task"] == "small"
    assert run.info.status == "FINISHED"


def test_csv_file(tmp_path):
    assert log_a_run("csv", tmp_path) == []
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    scales = [(int(r["step"]), float(r["value"])) for r in rows if r["name"] == "amp/loss_scale"]
    assert scales == list(enumerate(SCALES, start=1))
    assert {row["name"] for row in rows} == NUMBERS | {"amp/precision", "eval/accuracy"}


class Flaky:
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where, self.logged = where, 0

    def log(self, metrics, step) -> None:
        self.logged += 1
        if self.where == "log":
            raise OSError(28, "No space left on device")

    def finish(self) -> None:
        if self.where == "finish":
            raise RuntimeError("cannot upload")


@pytest.mark.parametrize(
    ("where", "words"),
    [("start", "no network"), ("log", "No space left on device"), ("finish", "cannot upload")],
)
def test_a_tracker_that_raises_is_reported_once_and_the_others_go_on(
    tmp_path, monkeypatch, where, words
):
    from ampwise.trackers import tensorboard_tracker

    flaky = Flaky(where)

    def start(folder, run_name, config):
        if where == "start":
            raise ConnectionError("no network")
        return flaky

    monkeypatch.setattr(tensorboard_tracker, "start", start)
    said: list[str] = []
    trackers = TrackerSet(["tensorboard", "csv"], tmp_path, "run", {}, said.append)
    for step in range(3):
        trackers.log({"train/loss": 1.0}, step)
    trackers.finish()
    assert len(said) == 1
    assert said[0].startswith("tracker tensorboard is off, training goes on")
    assert words in said[0]
    assert flaky.logged == {"start": 0, "log": 1, "finish": 3}[where]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


def test_one_that_is_not_installed_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "ampwise.trackers.wandb_tracker", raising=False)
    said: list[str] = []
    TrackerSet(["wandb"], tmp_path, "run", {}, said.append).log({"train/loss": 1.0}, 1)
    assert len(said) == 1
    assert extra_command("wandb") in said[0]


def test_a_csv_that_loses_its_disk(tmp_path):
    said: list[str] = []
    trackers = TrackerSet(["csv"], tmp_path, "run", {}, said.append)
    tracker = trackers._running["csv"]
    tracker._file = Path("/dev/full").open("w")  # noqa: SIM115
    tracker._writer = csv.writer(tracker._file)
    for step in range(5000):
        trackers.log({"train/loss": 1.0}, step)
    trackers.finish()
    assert len(said) == 1
    assert "No space left" in said[0]


def test_an_unknown_tracker_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"unknown tracker 'wandbb'.*did you mean 'wandb'"):
        TrackerSet(["wandbb"], Path(), "run", {}, print)
