"""``ampwise bench`` under torchrun, and what the other commands do there."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.bench import scaling
from ampwise.bench.arm import Settings
from ampwise.bench.memory import peak_on_cpu
from ampwise.bench.scaling import ALONE, APART, compare
from ampwise.bench.scaling_report import Scaled
from ampwise.cli.main import main
from ampwise.distributed import shard
from ampwise.distributed.launch import Launch
from ampwise.report.stored import load
from ampwise.step import TrainStep
from tests.distributed.commands import Command
from tests.distributed.launched import run, wait_until
from tests.distributed.ranks import Ranks
from tests.distributed.small import me

TASK = """
import os, torch, torch.nn.functional as F
from ampwise import Task

calls = 0

def task(width: int = 384, fails_after: int = 0):
    source = torch.Generator().manual_seed(1)
    sizes = [6, 6, 6, 2]
    data = [(torch.randn(n, width, generator=source), torch.randint(0, 3, (n,), generator=source))
            for n in sizes]

    def loss(model, batch):
        global calls
        calls += 1
        if fails_after and calls > fails_after and os.environ["RANK"] == "1":
            raise ValueError("this rank is broken")
        return F.cross_entropy(model(batch[0]), batch[1])

    def model():
        layers = [torch.nn.Linear(width, width) for _ in range(3)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, 3))

    return Task(model, lambda: list(data), loss, name="wide")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wide.py").write_text(TASK)
    return tmp_path


def test_bench_of_two_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(
        folder,
        *("bench", "wide.py", "--parallel", "ddp,fsdp", "--precisions", "bf16", "--steps", "6"),
        *("--out", "run", "--json", "found.json"),
    )
    assert command.finish() == [0, 0], command.err
    out = command.out
    assert out.count("2 processes, threads each: 1") == 1  # one process speaks for both
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads((folder / "found.json").read_text())
    assert found["schema"] == "ampwise.scaling/1"
    assert json.loads((folder / "run" / "run.json").read_text())["result"] == found
    assert (found["processes"], found["threads"]) == (2, [1, 1])
    assert found["samples_per_process"] == 6  # the short batch is left out
    assert any("accuracy parity" in note for note in found["notes"])
    rows = found["results"]
    assert [(each["precision"], each["processes"], each["parallel"]) for each in rows] == [
        *(("fp32", 1, ""), ("fp32", 2, "ddp"), ("fp32", 2, "fsdp")),
        *(("bf16", 1, ""), ("bf16", 2, "ddp"), ("bf16", 2, "fsdp")),
    ]
    for alone, ddp, fsdp in (rows[:3], rows[3:]):
        assert len(alone["peak_memory_bytes"]) == 1
        assert alone["efficiency"] is None
        for each in (ddp, fsdp):
            assert each["rounds"] == 6
            ratio = each["samples_per_s"] / (2 * alone["samples_per_s"])
            assert each["efficiency"]["median"] == pytest.approx(ratio, rel=0.8)  # a busy machine
            # Megabytes of gradients over sockets, and next to nothing to compute.
            assert 0 < each["communication"]["median"] < 1
            assert len(each["peak_memory_bytes"]) == len(each["held_bytes"]) == 2
        # Each rank holds half of the parameters and of Adam's two moments.
        held, whole = sum(fsdp["held_bytes"]), ddp["held_bytes"][0]
        assert held == pytest.approx(whole, rel=0.01)
        assert max(fsdp["peak_memory_bytes"]) < min(ddp["peak_memory_bytes"])

    page = (folder / "run" / "report.html").read_text()
    assert page.count("2 ddp") == 4
    assert main(["report", str(folder / "run")]) == 0
    told = capsys.readouterr().out
    assert "communication" in told
    assert told.strip() in out
    for form in ("markdown", "json"):
        assert main(["report", str(folder / "run" / "run.json"), "--format", form]) == 0
        assert "2 processes" in capsys.readouterr().out or form == "json"
    assert load(folder / "found.json") == load(folder / "run")


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_and_keeps_what_there_was(folder: Path) -> None:
    code, _, err = run(
        folder, *("bench", "wide.py", "--precisions", "fp32", "--out", "run"),
        *("--set", "fails_after=60"),
    )  # fmt: skip
    assert code
    assert "rank 1: the task's loss() raised ValueError" in err
    assert "this is a bug" not in err
    if "what there was" in err:  # unless torchrun was faster
        record = json.loads((folder / "run" / "run.json").read_text())
        assert record["status"] in ("failed", "interrupted")


def test_sigterm_to_all_ends_with_130_and_what_there_was(folder: Path) -> None:
    command = Command(
        folder, *("bench", "wide.py", "--precisions", "fp32", "--out", "run", "--steps", "100000")
    )
    wait_until(lambda: "round" in command.err)
    command.signal(signal.SIGTERM)
    assert command.finish() == [130, 130], command.err
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert record["result"]["results"][1]["efficiency"]["median"] > 0


def test_lint_is_done_by_one_process(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch\n"
        "scaler = torch.amp.GradScaler('cuda')\n"
        "def train(model, optimizer, loader):\n"
        "    for batch in loader:\n"
        "        scaler.scale(model(batch)).backward()\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
    )
    command = Command(folder, "lint", "train.py")
    assert command.finish() == [1, 0]
    assert command.out.count("AMP101") == 1
    assert command.err.count("one process does this") == 1


def test_the_other_ranks_leave_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["report", "nowhere"]) == 0
    assert capsys.readouterr() == ("", "")


def test_requests_that_make_no_sense_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--parallel", "ddp"]) == 2
    assert "for several processes" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "--gate", "strict"]) == 2
    assert "no requirements" in capsys.readouterr().err
    assert main(["bench", "--parallel", "ddp,fsdb"]) == 2
    assert "did you mean 'fsdp'" in capsys.readouterr().err


# -- its parts -------------------------------------------------------------------------------------


def test_ratios_are_of_the_same_round() -> None:
    drift = [1.0, 2.0, 4.0, 3.0, 1.5]
    times = {
        ALONE: [10 * each for each in drift],
        APART: [12.5 * each for each in drift],
        "ddp": [20 * each for each in drift],
    }
    alone, together = Scaled("fp32", 1), Scaled("fp32", 2, "ddp")
    compare(times, [alone, together], samples=8)
    assert together.efficiency is not None
    assert together.apart is not None
    assert together.communication is not None
    assert alone.efficiency is None
    for found, value in (
        (together.efficiency, 0.5),
        (together.apart, 0.8),
        (together.communication, 0.375),
    ):
        assert (found.low, found.median, found.high) == pytest.approx((value,) * 3)
    assert together.efficiency.median == pytest.approx(
        together.apart.median * (1 - together.communication.median)
    )
    assert alone.samples_per_s == pytest.approx(8 / 20e-3)
    assert together.samples_per_s == pytest.approx(2 * 8 / 40e-3)


class _Sleeper:
    """An arm whose step takes longer on the second rank."""

    def __init__(self) -> None:
        self.steps = 0

    def run(self, batch: Any) -> None:
        self.steps += 1
        time.sleep(0.02 + 0.1 * me())


def _turns() -> tuple[int, int, float, float]:
    own = Launch(rank=me(), size=2, local_rank=me(), local_size=2)
    alone, together = _Sleeper(), _Sleeper()
    arms: Any = {ALONE: alone, "ddp": together}
    turn = scaling._Turns(arms, Settings(torch.device("cpu"), accumulate=2), own)
    return turn(ALONE, None), turn("ddp", None), alone.steps, together.steps  # type: ignore


def test_a_turn_takes_as_long_as_its_slowest_rank(ranks: Ranks) -> None:
    first, second = ranks(_turns)
    assert first[:2] == second[:2]  # both know the same times
    assert 40 <= first[0] < 200 <= 240 <= first[1]  # whole windows, of two micro-batches each
    assert (first[2], second[2]) == (2, 0)
    assert (first[3], second[3]) == (2, 2)


def _peak(steps: int) -> int:
    def train() -> None:
        model = shard(nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))))
        step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy="fp32")
        for _ in range(steps):
            step(lambda model, batch: F.mse_loss(model(batch), batch), torch.ones(4, 128))

    return peak_on_cpu(train)


def test_the_peak_of_a_sharded_model_does_not_grow(ranks: Ranks) -> None:
    """As it would if what gloo's threads let go of were not counted."""
    short, long = ranks(_peak, 3), ranks(_peak, 8)
    assert short[0] == pytest.approx(long[0], rel=0.02)
