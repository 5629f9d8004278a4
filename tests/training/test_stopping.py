"""Ends of a run: signals, kills, full disks, failures. What was there stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from ampwise.errors import CheckpointError, SkippedStepsError, TaskError, UsageError
from ampwise.telemetry.run import RunFolder, read_steps
from ampwise.training import checkpoint
from ampwise.training.loop import train
from tests.forked import Python

from .small import Silent, config, task

ENDLESS = 10**9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_with_130(tmp_path, number):
    run = tmp_path / "run"
    command = ["-m", "ampwise", "train", "digits", "--steps", str(ENDLESS),
               "--out", str(run), "--precision", "fp32"]  # fmt: skip
    process = Python(command, tmp_path)
    deadline = time.monotonic() + 90
    while not checkpoint.finished(run / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.signal(number)
    code, out, err = process.ended()
    assert code == 130, err
    assert "interrupted" in out
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "interrupted"
    steps = checkpoint.load(checkpoint.newest(run / "checkpoints"))["step"]["steps"]
    assert steps == record["result"]["steps"] == read_steps(run)[-1]["step"]


@pytest.mark.slow
def test_50_random_kills_never_lose_a_finished_checkpoint(tmp_path):
    """Each child resumes the run and saves after every step, until kill -9 hits it anywhere."""
    run, draw, before = tmp_path / "run", random.Random(0), 0
    train(task(), config(run, "bf16", steps=1), Silent())
    for _ in range(50):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            settings = {"steps": ENDLESS, "checkpoint_every": 1, "resume": True}
            with contextlib.suppress(BaseException):
                train(task(), config(run, "bf16", **settings), Silent())
            os._exit(1)
        time.sleep(draw.uniform(0.02, 0.35))
        seen = checkpoint.newest(run / "checkpoints")
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        newest = checkpoint.newest(run / "checkpoints")
        assert newest is not None
        assert newest.name >= seen.name
        for path in checkpoint.finished(run / "checkpoints"):
            checkpoint.load(path)
        after = checkpoint.load(newest)["step"]["steps"]
        assert after >= before
        before = after
    assert before > 50  # they did train in between


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(task(), config(run, steps=2), Silent())

    def full(content, file):
        file.write(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left .*last finished one is .*00000002"):
        train(task(), config(run, steps=4, resume=True), Silent())
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002.pt"]
    assert json.loads((run / "run.json").read_text())["status"].startswith("failed")
    assert train(task(), config(run, steps=4, resume=True), Silent()).status == "finished"


def test_steps_jsonl_that_loses_its_disk_is_reported_once(tmp_path):
    said: list[str] = []
    folder = RunFolder.create(tmp_path / "run", "x", said.append)
    folder._lines = Path("/dev/full").open("w")  # noqa: SIM115
    for step in range(2000):
        folder.append({"step": step, "padding": "x" * 100})
    folder.flush()
    folder.close()
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_run_of_skipped_steps_fails_and_keeps_what_there_was(tmp_path):
    run = tmp_path / "run"
    train(task(), config(run, steps=3), Silent())
    hopeless = task(bad=tuple(range(1, 40)))
    with pytest.raises(SkippedStepsError, match="parameters are as after step 3"):
        train(hopeless, config(run, "fp16", steps=100, resume=True), Silent())
    record = json.loads((run / "run.json").read_text())
    assert "were all skipped" in record["status"]
    assert read_steps(run)[-1]["amp/skipped_total"] == 50
    assert read_steps(run)[-1]["amp/grad_norm"] in ("inf", "nan")


def test_a_task_that_raises_in_the_middle_keeps_its_own_error(tmp_path):
    import dataclasses

    calls = []

    def loss(model, pair):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("mine")
        return task().loss(model, pair)

    broken = dataclasses.replace(task(), loss=loss)
    with pytest.raises(ZeroDivisionError, match="mine") as failure:
        train(broken, config(tmp_path / "run", steps=9), Silent())
    assert failure.value.__ampwise_user__ == "the task's loss()"
    assert [line["step"] for line in read_steps(tmp_path / "run")] == [1, 2, 3]


def test_nan_in_the_very_first_batch_is_refused(tmp_path):
    with pytest.raises(
        TaskError, match=r"first batch holds inf or NaN: 4 of 8 values of batch\[0\]"
    ):
        import dataclasses

        x = torch.tensor([[1.0, float("nan")] * 2] * 2)
        bad = dataclasses.replace(task(), batches=lambda: [(x, torch.tensor([0, 1]))])
        train(bad, config(tmp_path / "run", steps=2), Silent())


def test_an_existing_run_is_not_overwritten(tmp_path):
    train(task(), config(tmp_path / "run", steps=1), Silent())
    with pytest.raises(UsageError, match="already holds a run: --resume continues it"):
        train(task(), config(tmp_path / "run", steps=1), Silent())


def test_an_unwritable_folder_is_a_clear_error():
    with pytest.raises(UsageError, match=r"name a writable folder with --out"):
        train(task(), config(Path("/proc/nowhere"), steps=1), Silent())


def test_runs_without_a_name_are_numbered(tmp_path):
    folders = [train(task(), config(None, steps=1), Silent()).folder for _ in range(2)]
    assert [str(each) for each in folders] == ["runs/small-fp32-1", "runs/small-fp32-2"]


def test_a_slow_loader_is_noticed(tmp_path):
    import dataclasses

    def slowly():
        for batch in task().batches():
            time.sleep(0.05)
            yield batch

    result = train(
        dataclasses.replace(task(), batches=slowly), config(tmp_path / "run", epochs=1), Silent()
    )
    assert result.data_wait_fraction > 0.5


def test_evaluation_runs_under_autocast_without_gradients_and_puts_modes_back(tmp_path):
    import dataclasses

    seen = []

    def evaluate(model):
        out = model(torch.randn(2, 8))
        seen.append((out.dtype, out.requires_grad, model.training, model[1].training))
        return {"accuracy": 1.0}

    def frozen():
        model = task().model()
        model[1].eval()
        return model

    checked = dataclasses.replace(task(), evaluate=evaluate, model=frozen)
    train(checked, config(tmp_path / "run", "bf16", steps=4, evaluate_every=2), Silent())
    assert seen == [(torch.bfloat16, False, False, False)] * 2
