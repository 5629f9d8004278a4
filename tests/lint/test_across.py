"""Mistakes that only several files together show: where they are, and what mends them."""

from __future__ import annotations

import pytest

from ampwise.lint.engine import lint, own_edits
from ampwise.lint.fix import fix_files
from ampwise.lint.model.queries import edit
from ampwise.lint.project import Project
from ampwise.lint.rule import Mistake
from ampwise.lint.settings import Settings

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

ENGINE = """\
import torch


def train_epoch(model, optimizer, loader, criterion):
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
from {module} import train_epoch


def main(model, optimizer, loader, criterion):
    for epoch in range(10):
        train_epoch(model, optimizer, loader, criterion)


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
    ]
    assert found(home / "model.py") == []


def test_what_several_files_lead_to_is_said_once(folder):
    home = folder(model=MODEL, train=TRAIN, again=TRAIN)
    places = [each[:3] for each in found(home, jobs=2)]
    assert places == [("model.py", 8, "AMP212"), ("model.py", 9, "AMP210")]


def test_what_a_file_shows_itself_is_not_put_down_to_others(folder):
    home = folder(whole=MODEL + TRAIN.replace("from model import Attention, Timed", ""))
    (home / "other.py").write_text(TRAIN.replace("model import", "whole import"))
    ways = {each[3] for each in found(home) if each[2] == "AMP212"}
    assert ways == {""}


def test_a_comment_in_the_file_of_the_mistake_silences_it(folder):
    silenced = MODEL.replace("-1e9)", "-1e9)  # ampwise: ignore[AMP212]")
    home = folder(model=silenced, train="# ampwise: ignore-file\n" + TRAIN)
    assert [each[2] for each in found(home)] == ["AMP210"]


def test_fixes_are_written_where_the_mistakes_are(folder):
    home = folder(model=MODEL, train=TRAIN)
    files = [home / "model.py", home / "train.py"]
    report = lint(files, Settings())
    assert fix_files(report, files, Settings(), unsafe=False) == {home / "model.py": 1}
    assert "torch.log_softmax(scores, dim=-1)" in files[0].read_text()
    assert files[1].read_text() == TRAIN
    assert [each[2] for each in found(home)] == ["AMP212"]
    assert fix_files(report, files, Settings(), unsafe=True) == {home / "model.py": 1}
    assert found(home) == []


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
    assert fix_files(report, files, Settings(), unsafe=True) == {}


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
    assert fix_files(lint(files), files, Settings(), unsafe=False) == {home / "loop.py": 1}
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


def test_the_cache_knows_the_files_that_decide(folder):
    home = folder(
        loop=LOOP.format(names="make, mixed"), helpers="def make(): ...\n\nmixed = make\n"
    )
    assert found(home) == []
    folder(helpers=HELPERS)
    assert [each[2] for each in found(home)] == ["AMP201", "AMP101"]
    folder(helpers="def make(): ...\n\nmixed = make\n")
    assert found(home) == []
