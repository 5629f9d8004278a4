"""Scripts of a user's own under torchrun: how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from ampwise import TrainStep

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = TrainStep(model, optimizer, policy="bf16-master", accumulate=2)
fails, calls = int(sys.argv[1]), 0

def loss_fn(model, batch):
    global calls
    calls += 1
    if calls == 7 and dist.get_rank() == fails:
        raise ValueError("no such label")
    return model(batch).square().mean()

for _ in range(10):
    step(loss_fn, torch.randn(4, 8))
"""


def launch(folder: Path, fails: int) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = ["--standalone", "--nproc-per-node", "2", str(script), str(fails)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )  # fmt: skip
    return ended.returncode, ended.stderr


def test_a_rank_that_fails_alone_inside_loss_fn_is_named_and_all_end(tmp_path: Path) -> None:
    """torchrun ends the others soon after; some tries until one of them could still speak."""
    said = ""
    for fails in (1, 0, 1):
        start = time.monotonic()
        code, err = launch(tmp_path, fails)
        assert code
        assert time.monotonic() - start < 60  # the group's own limit is 30 minutes
        assert "ValueError: no such label" in err
        said = next((line for line in err.splitlines() if "LostRankError" in line), "")
        if said:
            line = SCRIPT.splitlines().index('        raise ValueError("no such label")') + 1
            where = f"{tmp_path / 'script.py'}:{line}"
            assert f"rank {fails} failed at {where}: ValueError: no such label" in said
            return
    raise AssertionError(f"no rank named the one that failed:\n{err}")


@pytest.mark.slow
def test_processes_that_end_right_after_a_step_end_well(tmp_path: Path) -> None:
    """gloo's threads, in torch 2.13, abort about every third such process otherwise."""
    ended = [launch(tmp_path, fails=-1) for _ in range(20)]
    assert [code for code, _ in ended] == [0] * 20, [err for code, err in ended if code]
