"""``ampwise train`` under torchrun: real launchers, real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ampwise.telemetry.run import read_steps
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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_train_as_the_readme_says(folder: Path, parallel: str) -> None:
    code, out, err = run(
        folder,
        *("train", "little.py", "--precision", "fp16", "--allow-emulated", "--epochs", "2"),
        *("--parallel", parallel, "--out", "run"),
    )
    assert code == 0, err
    assert out.count("finished") == 1  # one process speaks for both
    assert f"2 processes, {parallel}" in err
    found = result(folder)
    assert (found["ranks"], found["parallel"], found["steps"]) == (2, parallel, 8)
    assert found["activity"]["matmul_dtypes"] == {"float16": 2}
    assert [line["step"] for line in read_steps(folder / "run") if "train/loss" in line] == [
        *range(1, 9)
    ]


def test_two_machines_by_two_agents_on_loopback(folder: Path) -> None:
    port = free_port()
    common = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}")
    agents = [
        start(
            folder,
            *("train", "little.py", "--precision", "bf16", "--allow-emulated", "--out", "run"),
            launcher=(*common, "--rdzv-backend=c10d", "--rdzv-id=7", f"--node-rank={node}"),
        )
        for node in range(2)
    ]
    codes = [finish(each) for each in agents]
    assert [code for code, _, _ in codes] == [0, 0], codes
    assert result(folder)["ranks"] == 2


def test_sigterm_to_all_saves_and_ends_with_130(folder: Path) -> None:
    process = start(
        folder,
        *("train", "little.py", "--precision", "fp32", "--steps", "1000", "--out", "run"),
        *("--set", "pause=0.05"),
    )
    wait_until(lambda: read_steps(folder / "run"))
    pids = workers(process)
    assert sorted(pids) == [0, 1]
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    _, _, err = finish(process)
    assert "exitcode  : 130" in err or "exitcode: 130" in err, err
    found = result(folder)
    assert found["status"] == "interrupted"
    assert 0 < found["steps"] < 1000


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
    code, out, err = run(tmp_path, "diagnose", "over.py", "--out", "run", "--steps", "4")
    assert out.count("RANGE_OVERFLOW") == 1, err
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert (found["rank"], found["cause"], found["step"]) == (1, "RANGE_OVERFLOW", 2)
    assert found["origin"]["source"] == "hidden = hidden * hidden"
    assert any(each["verified"] for each in found["fixes"])
    assert code
