"""``ampwise train`` on several ranks: real processes, and real launchers where they matter."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ampwise.telemetry.run import read_steps
from ampwise.training import checkpoint
from tests.distributed.commands import Command
from tests.distributed.launched import finish, free_port, run, start, wait_until, workers

TASK = """
import time, torch, torch.nn.functional as F
from ampwise import Task

def task(pause: float = 0.0, batches: int = 7):
    source = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 8, generator=source), torch.randint(0, 3, (6,), generator=source))
            for _ in range(batches)]

    def loss(model, batch):
        time.sleep(pause)
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model):
        hits = [(model(x).argmax(1) == y).float().mean() for x, y in data]
        return {"accuracy": float(sum(hits) / len(hits))}

    def model():
        return torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))

    return Task(model, lambda: list(data), loss, evaluate=evaluate, name="little")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "little.py").write_text(TASK)
    return tmp_path


def result(folder: Path, name: str = "run") -> dict[str, Any]:
    return json.loads((folder / name / "run.json").read_text())["result"]


TRAIN = ("train", "little.py", "--precision", "fp16", "--allow-emulated", "--epochs", "2")


def test_train_as_the_readme_says(folder: Path) -> None:
    code, out, err = run(folder, *TRAIN, "--parallel", "ddp", "--out", "run")
    assert code == 0, err
    trained_eight_steps(folder, "ddp", out, err)


def test_train_under_fsdp(folder: Path) -> None:
    command = Command(folder, *TRAIN, "--parallel", "fsdp", "--out", "run")
    assert command.finish() == [0, 0], command.err
    trained_eight_steps(folder, "fsdp", command.out, command.err)


def trained_eight_steps(folder: Path, parallel: str, out: str, err: str) -> None:
    assert out.count("finished") == 1  # one process speaks for both
    assert f"2 processes, {parallel}" in err
    found = result(folder)
    assert (found["ranks"], found["parallel"], found["steps"]) == (2, parallel, 8)
    assert found["activity"]["matmul_dtypes"] == {"float16": 2}
    assert [line["step"] for line in read_steps(folder / "run") if "train/loss" in line] == [
        *range(1, 9)
    ]


SHUFFLES = """
import random, torch, torch.distributed as dist
from ampwise import Task

def task():
    def batches():
        ids = list(range(16))
        random.shuffle(ids)
        return [torch.full((2, 4), float(each)) for each in ids]

    def loss(model, batch):
        with open(f"seen-{dist.get_rank()}", "a") as file:
            print(int(batch[0, 0]), file=file)
        return model(batch).square().mean()

    return Task(lambda: torch.nn.Linear(4, 1), batches, loss, name="shuffles")
"""


def test_a_task_that_shuffles_by_itself_is_dealt_out_whole(tmp_path: Path) -> None:
    (tmp_path / "shuffles.py").write_text(SHUFFLES)
    command = Command(tmp_path, "train", "shuffles.py", "--epochs", "1", "--precision", "fp32")
    assert command.finish() == [0, 0], command.err
    seen = [(tmp_path / f"seen-{rank}").read_text().split() for rank in range(2)]
    assert len(seen[0]) == len(seen[1]) == 8
    assert {int(each) for rank in seen for each in rank} == set(range(16))


NUMBERED = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from ampwise import Task

data = TensorDataset(torch.arange(24.0)[:, None])

def task(batch: int = 2):
    def loss(model, rows):
        with open(f"seen-{os.environ.get('RANK', 0)}", "a") as file:
            print(*(int(each) for each in rows[0]), file=file)
        return model(rows[0]).square().mean()

    return Task(
        lambda: torch.nn.Linear(1, 1), lambda: DataLoader(data, batch, shuffle=True), loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4), name="numbered")
"""


class Numbered:
    """Runs over 24 numbered samples in shuffled order, and what they trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "numbered.py").write_text(NUMBERED)

    def run(self, *arguments: str, ranks: int = 2) -> Command:
        common = ("train", "numbered.py", "--precision", "fp32", "--out", "run")
        return Command(self.folder, *common, *arguments, ranks=ranks)

    def seen(self) -> list[list[str]]:
        """Samples that each rank has trained on since they were last asked for."""
        files = sorted(self.folder.glob("seen-*"))
        found = [file.read_text().split() for file in files]
        for file in files:
            file.unlink()
        return found

    def position(self) -> dict[str, Any]:
        return checkpoint.load(checkpoint.newest(self.folder / "run" / "checkpoints"))["position"]


def test_an_epoch_after_a_resume_has_the_order_it_would_have_had(tmp_path: Path) -> None:
    whole, parts = Numbered(tmp_path / "whole"), Numbered(tmp_path / "parts")
    assert whole.run("--epochs", "2").finish() == [0, 0]
    assert parts.run("--epochs", "1").finish() == [0, 0]
    assert parts.run("--epochs", "2", "--resume").finish() == [0, 0]
    expected = whole.seen()
    assert parts.seen() == expected
    assert expected[0][:12] != expected[0][12:]


def test_another_batch_size_goes_on_at_the_sample_where_all_ranks_were(tmp_path: Path) -> None:
    numbered = Numbered(tmp_path / "numbered")
    assert numbered.run("--steps", "3").finish() == [0, 0]
    before = [number for mine in numbered.seen() for number in mine]
    again = ("--steps", "5", "--resume", "--set", "batch=3")
    refused = numbered.run(*again)
    assert refused.finish() == [2, 2]
    assert refused.err.count("batch size: 2 in the checkpoint, 3 now") == 1
    allowed = numbered.run(*again, "--allow-changes")
    assert allowed.finish() == [0, 0], allowed.err
    after = [number for mine in numbered.seen() for number in mine]
    assert sorted(map(int, before + after)) == list(range(24))
    assert (numbered.position()["batch"], numbered.position()["samples"]) == (8, 24)


def test_a_new_seed_gives_the_next_epoch_another_order_on_all_ranks(tmp_path: Path) -> None:
    whole, parts = Numbered(tmp_path / "whole"), Numbered(tmp_path / "parts")
    assert whole.run("--epochs", "2").finish() == [0, 0]
    assert parts.run("--steps", "2").finish() == [0, 0]
    again = parts.run("--epochs", "2", "--resume", "--seed", "5", "--allow-changes")
    assert again.finish() == [0, 0], again.err
    expected, seen = whole.seen(), parts.seen()
    assert [mine[:12] for mine in seen] == [mine[:12] for mine in expected]
    assert [mine[12:] for mine in seen] != [mine[12:] for mine in expected]
    assert sorted(int(each) for mine in seen for each in mine[12:]) == list(range(24))


def test_batches_that_are_trained_on_again_are_counted_once(tmp_path: Path) -> None:
    numbered = Numbered(tmp_path / "numbered")
    assert numbered.run("--steps", "5", ranks=1).finish() == [0]
    second = numbered.run("--steps", "6", "--resume")
    assert second.finish() == [0, 0], second.err
    assert "trained on again: 1 batch, too few" in second.err
    assert (numbered.position()["batch"], numbered.position()["samples"]) == (6, 12)


@pytest.mark.slow
def test_two_machines_by_two_agents_on_loopback(folder: Path) -> None:
    port = free_port()
    common = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}")
    agents = [
        start(
            folder,
            *("train", "little.py", "--precision", "bf16", "--allow-emulated", "--out", "run"),
            *("--parallel", "fsdp"),
            launcher=(*common, "--rdzv-backend=c10d", "--rdzv-id=7", f"--node-rank={node}"),
        )
        for node in range(2)
    ]
    codes = [finish(each) for each in agents]
    assert [code for code, _, _ in codes] == [0, 0], codes
    assert result(folder)["ranks"] == 2


def test_sigterm_to_all_saves_and_ends_with_130(folder: Path) -> None:
    command = Command(
        folder,
        *("train", "little.py", "--precision", "fp32", "--steps", "1000", "--out", "run"),
        *("--set", "pause=0.05"),
    )
    wait_until(lambda: read_steps(folder / "run"))
    command.signal(signal.SIGTERM)
    assert command.finish() == [130, 130], command.err
    found = result(folder)
    assert found["status"] == "interrupted"
    assert 0 < found["steps"] < 1000


@pytest.mark.slow
def test_elastic_restarts_need_a_named_folder(folder: Path) -> None:
    code, _, err = run(
        folder,
        *("train", "little.py"),
        launcher=("--standalone", "--nproc-per-node=2", "--max-restarts=1"),
    )
    assert code
    said = [line for line in err.splitlines() if line.startswith("ampwise: error: ")]
    assert said
    assert all("name its folder with --out" in line for line in said), said


OVERFLOWS = """
import torch, torch.distributed as dist, torch.nn.functional as F
from ampwise import Task

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden * hidden
        return self.head(hidden)

def task():
    source = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 8, generator=source), torch.randint(0, 3, (6,), generator=source))
            for _ in range(8)]
    data[3] = (data[3][0] * 2000, data[3][1])
    return Task(Net, lambda: list(data), lambda m, b: F.cross_entropy(m(b[0]), b[1]), name="over")
"""


def test_diagnose_names_the_first_bad_rank_and_the_operation(tmp_path: Path) -> None:
    (tmp_path / "over.py").write_text(OVERFLOWS)
    command = Command(tmp_path, "diagnose", "over.py", "--out", "run", "--steps", "4")
    assert command.finish() == [1, 1], command.err
    assert command.out.count("RANGE_OVERFLOW") == 1
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert (found["rank"], found["cause"], found["step"]) == (1, "RANGE_OVERFLOW", 2)
    assert found["origin"]["source"] == "hidden = hidden * hidden"
    assert any(each["verified"] for each in found["fixes"])


def _states(run: Path) -> tuple[dict[str, Any], list[float]]:
    content = checkpoint.load(checkpoint.newest(run / "checkpoints"))
    losses = [line["train/loss"] for line in read_steps(run) if "train/loss" in line]
    return content["model"], losses


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_worker_is_restarted_and_goes_on_bit_for_bit(folder: Path, parallel: str) -> None:
    arguments = (
        *("train", "little.py", "--precision", "fp16", "--allow-emulated", "--steps", "60"),
        *("--checkpoint-every", "5", "--parallel", parallel, "--set", "pause=0.03"),
    )
    agent = (
        *("--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    )
    assert Command(folder, *arguments, "--out", "whole").finish() == [0, 0]
    process = start(folder, *arguments, "--out", "run", launcher=agent)
    wait_until(lambda: len(checkpoint.finished(folder / "run" / "checkpoints")) > 1)
    os.kill(workers(process)[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert "resumed at step" in err
    whole, killed = _states(folder / "whole"), _states(folder / "run")
    assert killed[1] == whole[1]
    for name, expected in whole[0].items():
        assert torch.equal(killed[0][name], expected), name


def test_a_run_goes_on_with_fewer_and_more_processes(folder: Path) -> None:
    common = ("train", "little.py", "--precision", "fp16", "--allow-emulated", "--out", "run")
    first = Command(folder, *common, "--steps", "4", "--parallel", "fsdp")
    assert first.finish() == [0, 0], first.err
    alone = Command(folder, *common, "--steps", "8", "--resume", ranks=1)
    assert alone.finish() == [0], alone.err
    assert "from 2 ranks, now 1 rank: " in alone.err
    again = Command(folder, *common, "--steps", "12", "--resume")
    assert again.finish() == [0, 0], again.err
    assert "resumed at step 8" in again.err
    assert [line["step"] for line in read_steps(folder / "run") if "train/loss" in line] == [
        *range(1, 13)
    ]


HANGS = """
import time
import torch.distributed as dist
import little

def task():
    whole = little.task()
    seen = 0
    def loss(model, batch):
        nonlocal seen
        seen += 1
        while seen > 5 and dist.get_rank() == 1:
            time.sleep(1)
        return whole.loss(model, batch)
    import dataclasses
    return dataclasses.replace(whole, loss=loss, name="hangs")
"""


def test_a_rank_that_hangs_is_named_with_its_line(folder: Path) -> None:
    (folder / "hangs.py").write_text(HANGS)
    command = Command(
        folder,
        *("train", "hangs.py", "--precision", "fp32", "--steps", "50", "--out", "run"),
        *("--rank-timeout", "4"),
    )
    assert command.finish() == [3, 3], command.err
    said = [line for line in command.err.splitlines() if "rank 1 " in line and "hangs.py" in line]
    assert said, command.err
    assert "time.sleep(1)" in said[0]
    assert "rank 1 " in result(folder)["status"]
    assert result(folder)["status"].startswith("failed: ")
