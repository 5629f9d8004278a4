"""The fewest islands: minimal, sufficient on other batches, and in words that `resolve` takes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from ampwise.bench.arm import Settings
from ampwise.cli.main import main
from ampwise.numerics.diagnose import diagnose
from ampwise.policy import Policy
from ampwise.tasks import Task
from ampwise.tune.run import TuneConfig, make_hold
from ampwise.tune.search import minimal
from tests.numerics.cases import VARIANTS, SquaredNorm

CPU = Settings(torch.device("cpu"))


class Block(nn.Module):
    def __init__(self, hot: bool):
        super().__init__()
        self.norm = SquaredNorm() if hot else nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Net(nn.Module):
    """Only some blocks square what float16 cannot hold."""

    def __init__(self, hot=(1, 3)):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        nn.init.normal_(self.embed.weight, std=150.0)
        self.blocks = nn.ModuleList(Block(index in hot) for index in range(5))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(F.layer_norm(h, (16,)))


def norms(loss=None, model=Net) -> Task:
    def batches():
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            x = torch.randn(16, 8, generator=generator)
            yield x, (x.sum(-1) > 0).long()

    plain = lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1])  # noqa: E731
    return Task(model=model, batches=batches, loss=loss or plain, name="norms")


@given(
    some.integers(1, 12).flatmap(
        lambda n: some.tuples(some.just(n), some.sets(some.integers(0, n - 1), min_size=1))
    )
)
def test_delta_debugging_finds_exactly_what_is_needed(case):
    count, needed = case
    names = [str(index) for index in range(count)]
    wanted = {str(index) for index in needed}
    calls = []

    def holds(part):
        calls.append(part)
        return wanted <= set(part)

    assert set(minimal(names, holds)) == wanted
    assert len(calls) <= count * count + 3 * count


def test_float16_needs_exactly_the_norms_that_overflow():
    found = make_hold(norms(), Policy.parse("fp16"), TuneConfig([], CPU, steps=4))
    assert sorted(found.islands) == ["blocks.1.norm", "blocks.3.norm"]
    assert found.policy is not None
    assert Policy.parse(found.policy).islands == tuple(found.islands)
    assert found.gradient_db is not None
    assert found.gradient_db > 20
    assert diagnose(norms(), found.policy, steps=4).status in ("clean", "benign")
    fewer = f"fp16:islands={found.islands[0]}"
    assert diagnose(norms(), fewer, steps=4).status == "fault"  # one is not enough


def test_bfloat16_needs_none_and_a_wrong_loss_cannot_be_mended():
    found = make_hold(norms(), Policy.parse("bf16"), TuneConfig([], CPU, steps=3))
    assert (found.policy, found.islands) == ("bf16", [])

    def broken(model, batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1]) + torch.log(torch.tensor(-1.0))

    found = make_hold(norms(broken), Policy.parse("bf16"), TuneConfig([], CPU, steps=3))
    assert found.policy is None
    assert "DOMAIN_ERROR" in found.reason


def test_where_float32_fails_too_nothing_is_searched():
    task = VARIANTS["variance becomes zero in float32"].make()
    found = make_hold(task, Policy.parse("bf16"), TuneConfig([], CPU, steps=3))
    assert (found.policy, found.replays) == (None, 0)
    assert "CANCELLATION at line" in found.reason
    assert "float32 itself fails on this step" in found.reason


def test_a_stated_sqnr_is_kept_by_islands():
    task = norms(model=lambda: Net(hot=()))
    plain = make_hold(task, Policy.parse("bf16"), TuneConfig([], CPU, steps=3))
    assert plain.islands == []
    assert plain.gradient_db is not None
    assert plain.gradient_db < 60
    found = make_hold(task, Policy.parse("bf16"), TuneConfig([], CPU, steps=3, least_db=60.0))
    assert found.gradient_db is not None
    assert found.gradient_db >= 60
    assert 0 < len(found.islands) < 6  # of more than twenty modules


def test_the_command_prints_the_policy_and_writes_json(tmp_path, capsys):
    (tmp_path / "norms.py").write_text("from tests.tune.test_search import norms as task\n")
    command = ["tune", str(tmp_path / "norms.py"), "--precisions", "fp16", "--steps", "4"]
    assert main([*command, "--no-bench", "--quiet", "--out", "a"]) == 0
    said = capsys.readouterr().out
    assert "fp16:islands=" in said
    found = json.loads((tmp_path / "a" / "tune.json").read_text())
    assert found["schema"] == "ampwise.tune/1"
    assert sorted(found["tried"][0]["islands"]) == ["blocks.1.norm", "blocks.3.norm"]
    assert main([*command, "--quiet", "--seeds", "0", "--out", "b"]) == 0
    found = json.loads((tmp_path / "b" / "tune.json").read_text())
    assert found["bench"]["precisions"][1]["name"] == found["tried"][0]["policy"]
    assert found["tried"][0]["speedup"] is not None
    assert capsys.readouterr().out.count("Use --precision") + (found["choice"] == "fp32") == 1


@pytest.mark.parametrize(
    "arguments", [["--least-sqnr", "0"], ["--precisions", ","], ["--precisions", "fp32"]]
)
def test_bad_input_is_one_line(arguments, capsys):
    assert main(["tune", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
