"""A run folder that somebody has damaged: one line and exit code 2, never a hang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ampwise.cli.main import main
from ampwise.errors import UsageError
from ampwise.training import checkpoint
from ampwise.training.loop import train

from .small import Silent, config, task

TASK = """
import torch
from ampwise import Task
def task():
    return Task(name="mine", model=lambda: torch.nn.Linear(4, 2),
                batches=lambda: [torch.ones(4, 4)] * 3, loss=lambda m, x: m(x).float().mean())
"""
HUGE = 10**400
DEEP = "[" * 100_000
WRONG = [None, [], {}, "x", float("nan"), HUGE, -1, True, 1.5]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of three steps, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(TASK)
    with contextlib.chdir(folder):
        given = ["--precision", "fp32", "--device", "cpu", "--out", "run", "--quiet"]
        assert main(["train", "mine.py", *given]) == 0
    return folder


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def refused(capsys) -> str:
    """What a resume says, which ends with exit code 2."""
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "run", "--epochs", "2", "--quiet"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("ampwise: error: ")
    assert "bug in ampwise" not in said
    assert "\n" not in said
    assert len(said) < 600
    return said


def become(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("file", ["run.json", "steps.jsonl", "checkpoints/step-00000003.pt"])
def test_what_is_no_file_is_not_waited_for(run, capsys, file, kind):
    become(run / file, kind)
    assert file.split("/")[-1] in refused(capsys)


def test_a_part_of_a_checkpoint_that_is_a_pipe(run, capsys):
    path = run / "checkpoints" / "step-00000009"
    path.mkdir()
    os.mkfifo(path / "common.pt")
    assert "it is a pipe" in refused(capsys)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "7", "{", DEEP, '{"a": ' * 50_000, "\x00", f"{'9' * 5000}",
     '{"options": []}', '{"options": null}', '{"options": {"precission": "bf16"}}'],
    ids=lambda text: text[:20] or "empty",
)  # fmt: skip
def test_a_damaged_record(run, capsys, text):
    (run / "run.json").write_text(text)
    assert "run.json" in refused(capsys)


@pytest.mark.parametrize("name", ["steps", "accumulate", "seed", "task", "precision", "strict",
                                  "set", "max_grad_norm", "schedule", "track"])  # fmt: skip
@pytest.mark.parametrize("value", [[], {}, float("nan"), HUGE, True, [[1]], "x y"], ids=repr)
def test_a_damaged_option_of_the_record_is_an_error_or_fits(run, capsys, name, value):
    record = json.loads((run / "run.json").read_text())
    record["options"][name] = value
    (run / "run.json").write_text(json.dumps(record))
    code = main(["train", "--resume", "--out", "run", "--epochs", "2", "--quiet"])
    said = capsys.readouterr().err
    assert "bug in ampwise" not in said
    assert code in (0, 2)
    if not fits(name, value):
        assert code == 2, said
        named = (
            "ampwise: error: options of the run in run: ",
            "ampwise: error: run/run.json is no",
        )
        assert said.startswith(named) or (name.replace("_", "-") in said)


def fits(name: str, value: object) -> bool:
    """Whether a value may stand for an option; lists of words, and empty ones, may."""
    harmless = {"strict": (True,), "set": ({},), "track": ([],), "seed": ()}
    return any(value is each or value == each for each in harmless.get(name, ())) or (
        name == "steps"  # given anew, with --epochs
    )


@pytest.mark.parametrize(
    "line",
    ["null", "[]", "7", '"x"', "{", DEEP, "{}", '{"step": "3"}', '{"step": null}', '{"step": NaN}',
     '{"step": [1]}', f'{{"step": {HUGE}}}', f'{{"step": 1, "train/loss": {HUGE}}}',
     '{"step": 1, "train/loss": null}', '{"step": 1, "train/loss": "high"}',
     '{"step": 1, "train/loss": [1.0]}', '{"step": -1}', '{"step": true}'],
    ids=lambda line: line[:30],
)  # fmt: skip
def test_a_damaged_line_of_steps(run, capsys, line):
    good = (run / "steps.jsonl").read_text()
    (run / "steps.jsonl").write_text(f"{good}{line}\n")
    said = refused(capsys)
    assert f"steps.jsonl, line {len(good.splitlines()) + 1} is damaged" in said
    assert "remove that line" in said


def test_steps_that_are_no_text(run, capsys):
    (run / "steps.jsonl").write_bytes(b"\xff\xfe\n")
    assert "steps.jsonl" in refused(capsys)


# -- every value of a checkpoint ------------------------------------------------------------------

SETTINGS = {"max_grad_norm": 1.0, "warmup_steps": 6}


def _places(value, at=()):
    """Every place in nested containers; of long ones the first two."""
    if at:
        yield at
    keys = value if isinstance(value, dict) else range(min(2, len(value)))
    for key in keys:
        if isinstance(value[key], dict | list | tuple):
            yield from _places(value[key], (*at, key))
        else:
            yield (*at, key)


def _with(value, at, new):
    """A copy with something else in a place; nothing there at all for `...`."""
    copy = type(value)(value) if isinstance(value, dict) else list(value)
    if len(at) > 1:
        copy[at[0]] = _with(value[at[0]], at[1:], new)
    elif new is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = new
    return copy if isinstance(value, dict) else type(value)(copy)


@pytest.fixture(scope="module", params=["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
def eight_steps(request, tmp_path_factory):
    """A run to be copied, and its precision; one in float16 has all that the others have to lose."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(task((3,)), config(folder, request.param, steps=8, **SETTINGS), Silent())
    return folder, request.param


@pytest.mark.parametrize("wrong", [*WRONG, ...], ids=lambda each: str(each)[:8])
def test_every_wrong_value_in_a_checkpoint_is_an_error_or_fits(tmp_path, eight_steps, wrong):
    folder, precision = eight_steps
    shutil.copytree(folder, tmp_path / "run")
    good = checkpoint.newest(tmp_path / "run" / "checkpoints")
    content, refusals = torch.load(good, weights_only=True), 0
    for place in _places(content):
        for path in checkpoint.finished(good.parent):
            path.unlink()
        torch.save(_with(content, place, wrong), good)
        again = config(tmp_path / "run", precision, steps=10, resume=True, **SETTINGS)
        said = ""
        try:
            train(task(), again, Silent())
        except UsageError as error:
            said = str(error)
        refusals += bool(said)
        assert all(len(line) < 600 for line in said.splitlines()), place
    assert refusals > 40


def test_a_checkpoint_whose_state_no_step_can_be_made_from_is_named(tmp_path):
    train(task(), config(tmp_path / "run", steps=2), Silent())
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    content = torch.load(path, weights_only=True)
    del content["optimizer"]["state"][0]["exp_avg"]
    torch.save(content, path)
    with pytest.raises(UsageError, match=r"step-00000002.pt is damaged \(KeyError: 'exp_avg'\)"):
        train(task(), config(tmp_path / "run", steps=4, resume=True), Silent())


def test_an_error_of_the_task_after_a_resume_is_the_tasks(tmp_path):
    train(task(), config(tmp_path / "run", steps=2), Silent())
    broken = task()
    object.__setattr__(broken, "loss", lambda model, batch: model.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        train(broken, config(tmp_path / "run", steps=4, resume=True), Silent())
