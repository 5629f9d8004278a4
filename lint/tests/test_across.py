"""Mistakes that only several files together show: where they are, and what mends them."""

from __future__ import annotations

import pytest

from ampwise_lint.engine import lint, own_edits
from ampwise_lint.fix import fix_files
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake
from ampwise_lint.settings import Settings
from ampwise_lint.source.project import Project

MODEL = """\
import torch
from torch import nn


class Attention(nn.Module):
    def forward(self, q, k, mask):
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, -1e9)
        return torch.log(torch.softmax(scores, dim=-1))


class Timed(nn.Module):
    def forward(self, x):
        return x * x.sum().item()
"""

TRAIN = """\
import torch
from model import Attention, Timed

model, timed = Attention(), Timed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cuda")
for q, k, mask in torch.load("data.pt"):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = timed(model(q, k, mask)).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

STEP = """\
import torch


def train_one_step(model, optimizer, scaler, batch, number, n):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch).mean() / n
    if number % n == 0:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    else:
        with model.no_sync():
            scaler.scale(loss).backward()
"""

PARALLEL = """\
import torch
from step import train_one_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(loader, n):
    model = DistributedDataParallel(nn.Linear(8, 8).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    number = 0
    while True:
        for batch in loader:
            number += 1
            train_one_step(model, optimizer, scaler, batch, number, n)
"""

ENGINE = """\
import torch


def train_once(model, optimizer, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

MAIN = """\
import torch
from {module} import train_once


def main(model, optimizer, loader, criterion):
    for epoch in range(10):
        train_once(model, optimizer, loader, criterion)


if __name__ == "__main__":
    main(*torch.load("all.pt"))
"""

HELPERS = """\
import torch

scaler = torch.amp.GradScaler("cuda")


def make():
    return scaler


def mixed():
    return torch.autocast("cuda")
"""

LOOP = """\
import torch
from helpers import {names}


def train(model, optimizer, loader, criterion):
    mine = make()
    for x, y in loader:
        optimizer.zero_grad()
        with mixed():
            loss = criterion(model(x), y)
            mine.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mine.step(optimizer)
        mine.update()
"""

SAVING = """\
import torch
from util import save

def train(model, optimizer, loader, criterion, path):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(path, state)
"""
SAVE = "import torch\n\n\ndef save(path, state):\n    torch.save(state, path)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "code"
    home.mkdir()
    monkeypatch.chdir(home)

    def write(**texts: str):
        for name, text in texts.items():
            path = home / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return home

    return write


def found(folder, **flags):
    report = lint([folder], Settings(), **flags)
    return [(each.path, each.line, each.code, each.reached_from) for each in report.findings]


def test_a_network_in_its_own_file_is_judged_by_the_training_that_runs_it(folder):
    home = folder(model=MODEL, train=TRAIN)
    assert found(home) == [
        ("model.py", 8, "AMP212", "train.py"),
        ("model.py", 9, "AMP210", "train.py"),
        ("model.py", 14, "AMP301", "train.py"),
    ]
    assert found(home / "model.py") == []


def test_what_several_files_lead_to_is_said_once(folder):
    home = folder(model=MODEL, train=TRAIN, again=TRAIN)
    places = [each[:3] for each in found(home, jobs=2)]
    assert places == [
        ("model.py", 8, "AMP212"),
        ("model.py", 9, "AMP210"),
        ("model.py", 14, "AMP301"),
    ]


def test_what_a_file_shows_itself_is_not_put_down_to_others(folder):
    home = folder(whole=MODEL + TRAIN.replace("from model import Attention, Timed", ""))
    (home / "other.py").write_text(TRAIN.replace("model import", "whole import"))
    ways = {each[3] for each in found(home) if each[2] == "AMP212"}
    assert ways == {""}


def test_a_step_of_another_file_that_holds_synchronisation_back(folder):
    home = folder(step=STEP, train=PARALLEL)
    assert [each[2] for each in found(home)] == []
    unsynchronised = STEP.replace("with model.no_sync():", "if True:")
    (home / "step.py").write_text(unsynchronised)
    assert {each[2] for each in found(home)} == {"AMP307"}


def test_a_comment_in_the_file_of_the_mistake_silences_it(folder):
    silenced = MODEL.replace("-1e9)", "-1e9)  # ampwise: ignore[AMP212]")
    home = folder(model=silenced, train="# ampwise: ignore-file\n" + TRAIN)
    assert [each[2] for each in found(home)] == ["AMP210", "AMP301"]


def test_fixes_are_written_where_the_mistakes_are(folder):
    home = folder(model=MODEL, train=TRAIN)
    files = [home / "model.py", home / "train.py"]
    report = lint(files, Settings())
    assert fix_files(report, files, Settings(), unsafe=False).files == {home / "model.py": 1}
    assert "torch.log_softmax(scores, dim=-1)" in files[0].read_text()
    assert files[1].read_text() == TRAIN
    assert [each[2] for each in found(home)] == ["AMP212", "AMP301"]
    assert fix_files(report, files, Settings(), unsafe=True).files == {home / "model.py": 1}
    assert [each[2] for each in found(home)] == ["AMP301"]


LATE = """\
import torch
from late import finish


def train(model, optimizer, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finish(scaler, optimizer)
"""
FINISH = """\
def finish(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_mistake_that_two_files_make_together_is_not_half_mended(folder):
    home = folder(train=LATE, late=FINISH)
    files = [home / "late.py", home / "train.py"]
    report = lint(files)
    assert [(each.line, each.code, each.edits) for each in report.findings] == [(12, "AMP101", ())]
    assert fix_files(report, files, Settings(), unsafe=True).files == {}


def test_an_edit_is_for_the_file_its_node_stands_in(folder):
    home = folder(a="x = 1\n", b="x = 1\n")
    files = home / "a.py", home / "b.py"
    here, there = map(Project(frozenset(files)).module, files)
    kept, lost = (
        own_edits(Mistake(here.tree.body[0], here, "", (edit("remove", each.tree.body[0]),)))
        for each in (here, there)
    )
    assert ([each.what for each in kept], lost) == (["remove"], ())


@pytest.mark.parametrize("names", ["make, mixed", "*"])
def test_a_loop_whose_scaler_and_autocast_are_made_elsewhere(folder, names):
    home = folder(loop=LOOP.format(names=names), helpers=HELPERS)
    assert [each[1:3] for each in found(home)] == [(11, "AMP201"), (12, "AMP101")]


def test_fixes_know_the_files_without_mistakes(folder):
    home = folder(loop=LOOP.format(names="make, mixed"), helpers=HELPERS)
    files = [home / "loop.py", home / "helpers.py"]
    assert fix_files(lint(files), files, Settings(), unsafe=False).files == {home / "loop.py": 1}
    assert "mine.unscale_(optimizer)" in files[0].read_text()


@pytest.mark.parametrize("package", [False, True])
def test_a_script_that_runs_a_loop_of_another_file(folder, package):
    if package:
        home = folder(**{"tools/__init__": "from .engine import *\n", "tools/engine": ENGINE})
        folder(main=MAIN.format(module="tools"))
    else:
        home = folder(engine=ENGINE, main=MAIN.format(module="engine"))
    assert [(code, way) for _, _, code, way in found(home)] == [("AMP110", "main.py")]


def test_a_checkpoint_lacks_the_scaler_where_its_dict_is_made(folder):
    home = folder(train=SAVING, util=SAVE)
    assert found(home) == [("train.py", 13, "AMP111", "")]
    files = [home / "train.py", home / "util.py"]
    fix_files(lint(files), files, Settings(), unsafe=True)
    assert '"scaler": scaler.state_dict()}' in files[0].read_text()
    assert files[1].read_text() == SAVE


def test_a_script_runs_the_file_whose_dict_lacks_it(folder):
    main = "from train import train\n\ntrain(*open('all'))\n"
    home = folder(train=SAVING, util=SAVE, main=main)
    assert [each[:3] for each in found(home)] == [("train.py", 13, "AMP111")]


def test_the_cache_knows_the_files_that_decide(folder):
    home = folder(
        loop=LOOP.format(names="make, mixed"), helpers="def make(): ...\n\nmixed = make\n"
    )
    assert found(home) == []
    folder(helpers=HELPERS)
    assert [each[2] for each in found(home)] == ["AMP201", "AMP101"]
    folder(helpers="def make(): ...\n\nmixed = make\n")
    assert found(home) == []


NORM = """\
import torch


def norm_of(parameters):
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    kept = list(filter(lambda p: p.grad is not None, parameters))
    return sum(p.grad.norm() ** 2 for p in kept) ** 0.5


def make_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
"""
CALLS = """\
import torch
from norm import make_optimizer, norm_of


def train(model, loader, criterion, name):
    optimizer = make_optimizer(name, model)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        size = norm_of(model.parameters())
        scaler.step(optimizer)
        scaler.update()
"""


def test_a_helper_that_does_what_it_is_told_is_called_wrongly(folder):
    """Reading gradients is the mistake of who has not unscaled them; the optimizer is as made."""
    home = folder(norm=NORM, train=CALLS)
    assert found(home) == [
        ("norm.py", 13, "AMP305", "train.py"),
        ("train.py", 13, "AMP102", ""),
    ]
    files = [home / "norm.py", home / "train.py"]
    fix_files(lint(files), files, Settings(), unsafe=True)
    assert "scaler.unscale_(optimizer)\n        size = norm_of" in files[1].read_text()
    assert found(home) == []


SETTINGS = """\
class Config:
    def __init__(self):
        self.task = "predict"
        self.amp = False
"""
TASKS = """\
import torch
from settings import Config


def train(model, optimizer, loader, config):
    scaler = torch.amp.GradScaler("cuda", enabled=config.amp)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=config.amp):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    config = Config()
    if config.task == "train":
        train(*torch.load("all.pt"), config)
"""


def test_what_settings_are_set_to_may_be_changed(folder):
    home = folder(settings=SETTINGS, main=TASKS)
    assert [each[1:3] for each in found(home)] == [(12, "AMP101")]


def test_other_libraries_than_torch_are_not_judged(folder):
    paddle = LOOP.format(names="make, mixed").replace("import torch\n", "import paddle\n")
    assert found(folder(loop=paddle.replace("torch.nn", "paddle.nn"), helpers=HELPERS)) == []


STAGES = """\
import enum


class Stage(enum.Enum):
    TRAIN = enum.auto()
    TEST = enum.auto()
"""
STAGED = """\
import torch
import tools.stages


class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader

    def loss(self, out, y, stage):
        if stage != tools.stages.Stage.TRAIN:
            print(out.argmax(1).cpu())
        return torch.nn.functional.cross_entropy(out, y)

    def train(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.loss(self.model(x), y, tools.stages.Stage.{stage})
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize("stage", ["TRAIN", "TEST"])
def test_members_of_an_enum_are_told_apart(folder, stage):
    home = folder(
        **{"tools/__init__": "", "tools/stages": STAGES}, trainer=STAGED.format(stage=stage)
    )
    assert bool(found(home)) == (stage == "TEST")


RETURNS = """\
import torch


def is_late(path):
    if path.exists():
        return True
    return False


def train(model, optimizer, loader, path):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(9):
        if is_late(path):
            break
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""


def test_a_function_may_return_what_another_case_returns(folder):
    assert [each[1:3] for each in found(folder(train=RETURNS))] == [(20, "AMP101")]


LOG_PROBABILITIES = """\
import torch.nn.functional as F


def of_tokens(logits, targets):
    return F.log_softmax(logits, dim=-1).gather(2, targets.unsqueeze(-1)).squeeze(-1)
"""
POLICY = """\
import torch
from tools import of_tokens


def train(model, optimizer, loader, advantage):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
        found = of_tokens(logits{cast}, y)
        loss = -(found * advantage).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("cast", "where"), [("", [("train.py", 10)]), (".float()", [])])
def test_a_helper_that_is_given_half_outputs_is_called_wrongly(folder, cast, where):
    home = folder(tools=LOG_PROBABILITIES, train=POLICY.format(cast=cast))
    assert [each[:2] for each in found(home) if each[2] == "AMP202"] == where
