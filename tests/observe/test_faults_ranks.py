"""Faults on ranks as torchrun starts them: a rank runs its part again by itself, and what it finds is told to all."""

from __future__ import annotations

import json

import pytest

from tests.distributed.commands import Command
from tests.observe.inside import line_of

SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F

torch.set_num_threads(1)
dist.init_process_group("gloo")
kind = sys.argv[1]
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(8, 16), nn.Linear(16, 4), 0

    def forward(self, x):
        self.n += 1
        h = torch.relu(self.a(x))
        if self.n == 6 and dist.get_rank() == 1:
            h = h * 1e30 * 1e30  # planted
        if kind == "gather":
            total = h.detach().sum()
            dist.all_reduce(total)
            h = h + 0 * total
        return self.b(h)

model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(8):
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()  # backward
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["plain", pytest.param("gather", marks=pytest.mark.slow)])
def test_a_fault_of_another_rank_is_told(tmp_path, kind):
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    own = ["--quiet", "--out", str(tmp_path / "out"), "--json", str(report)]
    command = Command(tmp_path, "run", *own, str(script), kind)
    assert command.finish(200) == [0, 0], command.err
    (found,) = json.loads(report.read_text())["faults"]
    if kind == "plain":
        assert (found["status"], found["cause"], found["rank"]) == ("fault", "RANGE_OVERFLOW", 1)
        assert found["origin"]["line"] == line_of(script, "# planted")
    else:
        assert found["status"] == "not_reproduced"
        assert "it talks to other ranks" in found["explanation"]
