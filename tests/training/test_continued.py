"""A resume goes on with what the run was asked for; what is given anew wins."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from ampwise.cli import invocation
from ampwise.cli.main import main
from ampwise.cli.train import OF_ONE_CALL, Options
from ampwise.distributed.launch import Launch
from ampwise.training import checkpoint
from ampwise.training import loop as training
from ampwise.training.config import TrainConfig
from tests.forked import Python

TASK = """
import torch
from ampwise import Task
def task(width=2):
    return Task(name="mine", model=lambda: torch.nn.Linear(4, width),
                batches=lambda: [torch.ones(4, 4)] * 6, loss=lambda m, x: m(x).float().mean(),
                evaluate=lambda m: {"score": 1.0})
"""

GIVEN = {
    "task": ["other.py"],
    "set": ["--set", "width=3"],
    "device": ["--device", "cpu"],
    "seed": ["--seed", "7"],
    "precision": ["--precision", "bf16"],
    "levers": ["--levers", "batch=2"],
    "allow_emulated": ["--allow-emulated", "--precision", "fp16"],
    "strict": ["--strict"],
    "steps": ["--steps", "2"],
    "epochs": ["--epochs", "2"],
    "accumulate": ["--accumulate", "3"],
    "max_grad_norm": ["--max-grad-norm", "0.5"],
    "schedule": ["--schedule", "cosine", "--steps", "2"],
    "warmup_steps": ["--warmup-steps", "4"],
    "evaluate_every": ["--evaluate-every", "5"],
    "checkpoint_every": ["--checkpoint-every", "5"],
    "on_fault": ["--on-fault", "stop"],
    "parallel": ["--parallel", "fsdp"],
    "rank_timeout": ["--rank-timeout", "77"],
    "watch_every": ["--watch-every", "9"],
    "track": ["--track", "csv"],
}
"""A value that is not the default, for every option that a run remembers."""

OF_ONE_RUN = {"out", "resume", "allow_changes", "options"}
"""Settings that a resumed run has of its own."""


@pytest.fixture
def configs(monkeypatch, tmp_path):
    """Settings of each run that is started, in order."""
    for name in ("mine.py", "other.py"):
        (tmp_path / name).write_text(TASK)
    seen: list[TrainConfig] = []
    inner = training.train

    def train(task, config, *rest):
        seen.append(config)
        return inner(task, config, *rest)

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr("ampwise.distributed.wrap.spread", lambda model, *_: model)
    return seen


def started(given: list[str]) -> int:
    """A run of `given`; what only several processes take is put into its record by hand."""
    alone = [] if "fsdp" in given else given
    task = [] if "other.py" in given else ["mine.py"]
    task += [] if "--precision" in given else ["--precision", "fp32"]  # auto is decided later
    code = main(["train", *task, *alone, "--out", "run", "--quiet"])
    if alone != given:
        record = json.loads(Path("run/run.json").read_text())
        record["options"]["parallel"] = "fsdp"
        Path("run/run.json").write_text(json.dumps(record))
    return code


def comparable(config: TrainConfig) -> dict:
    values = {name: each for name, each in vars(config).items() if name not in OF_ONE_RUN}
    values["resolution"] = (config.resolution.policy, config.resolution.device)
    cells = config.on_fault.__closure__ if config.on_fault else ()
    return {**values, "on_fault": [cell.cell_contents for cell in cells]}


REMEMBERED = [each.name for each in fields(Options) if each.name not in OF_ONE_CALL]


@pytest.mark.parametrize("name", REMEMBERED)
def test_every_option_is_taken_from_the_run(configs, name):
    assert started(GIVEN[name]) == 0
    before = json.loads(Path("run/run.json").read_text())["options"]
    assert name in before
    assert main(["train", "--resume", "--out", "run", "--quiet"]) == 0
    assert json.loads(Path("run/run.json").read_text())["options"] == before
    if name != "parallel":
        assert comparable(configs[0]) == comparable(configs[1])
    else:
        assert configs[1].parallel == "fsdp"


def test_no_setting_of_a_run_is_forgotten(configs):
    """Each setting follows some option: it is another than without options in one of the runs."""
    assert started([]) == 0
    plain, varied = comparable(configs[0]), set()
    for number, given in enumerate(GIVEN.values()):
        Path("run").rename(f"run-{number}")
        assert started(given) == 0
        if "fsdp" in given:
            assert main(["train", "--resume", "--out", "run", "--quiet"]) == 0
        now = comparable(configs[-1])
        varied |= {key for key in plain if now[key] != plain[key]}
    assert varied == {each.name for each in fields(TrainConfig)} - OF_ONE_RUN


def test_the_end_that_was_asked_for_is_kept(configs):
    assert main(["train", "mine.py", "--steps", "3", "--out", "run", "--quiet"]) == 0
    assert main(["train", "--resume", "--out", "run", "--quiet", "--steps", "20"]) == 0
    assert main(["train", "--resume", "--out", "run", "--quiet"]) == 0
    assert [(each.steps, each.epochs) for each in configs] == [(3, None), (20, None), (20, None)]
    assert main(["train", "--resume", "--out", "run", "--quiet", "--epochs", "5"]) == 0
    assert (configs[-1].steps, configs[-1].epochs) == (None, 5)


def test_a_value_given_anew_needs_leave_as_before(configs, capsys):
    assert main(["train", "mine.py", "--seed", "3", "--out", "run", "--quiet"]) == 0
    assert main(["train", "--resume", "--out", "run", "--seed", "4", "--quiet"]) == 2
    assert "seed: 3 in the checkpoint, 4 now" in capsys.readouterr().err
    given = ["train", "--resume", "--out", "run", "--seed", "4", "--allow-changes", "--epochs", "2"]
    assert main([*given, "--quiet"]) == 0
    assert main(["train", "--resume", "--out", "run", "--quiet"]) == 0
    assert configs[-1].seed == 4


def test_a_config_file_wins_over_the_run_and_flags_over_both(configs):
    given = ["--evaluate-every", "2", "--checkpoint-every", "2", "--watch-every", "2"]
    assert main(["train", "mine.py", *given, "--out", "run", "--quiet"]) == 0
    Path("c.toml").write_text("checkpoint_every = 3\nwatch_every = 3\nresume = true\nout = 'run'")
    assert main(["train", "--config", "c.toml", "--watch-every", "4", "--quiet"]) == 0
    config = configs[-1]
    assert (config.evaluate_every, config.checkpoint_every, config.watch_every) == (2, 3, 4)
    assert config.resume


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("r", marks=pytest.mark.slow),
        "it's a run $HOME",
        pytest.param("-r", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_names_the_command_that_continues_it(tmp_path, folder):
    (tmp_path / "mine.py").write_text(TASK)
    given = ["--steps", "100000000", "--set", "width=3", "--precision", "fp32"]
    command = [sys.executable, "-m", "ampwise", "train", "mine.py", *given, f"--out={folder}"]
    line = shlex.join(command)
    for start in (_Fresh, _forked):
        process = start(shlex.split(line), tmp_path)
        _until_it_trains(process, Path(folder))
        process.signal(signal.SIGINT)
        code, _, said = process.ended()
        assert code == 130, said
        line = said.splitlines()[-1].removeprefix("to go on: ")
        assert line.startswith(shlex.join([sys.executable, "-m", "ampwise", "train", "--resume"]))
        record = json.loads((Path(folder) / "run.json").read_text())
        assert record["options"]["steps"] == record["config"]["steps"] == 100000000
    assert record["result"]["resumed_from"] > 0
    assert record["result"]["steps"] > record["result"]["resumed_from"]


class _Fresh(subprocess.Popen):
    """A Python that starts, which knows how it was called."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True)

    def alive(self) -> bool:
        return self.poll() is None

    signal = subprocess.Popen.send_signal

    def ended(self) -> tuple[int, str, str]:
        out, err = self.communicate(timeout=60)
        return self.returncode, out, err


def _forked(command: list[str], cwd: Path) -> Python:
    assert command[0] == sys.executable
    return Python(command[1:], cwd)


def _until_it_trains(process: _Fresh | Python, folder: Path) -> None:
    """Wait until there is a checkpoint that the process itself has written."""
    deadline, before = time.monotonic() + 90, checkpoint.finished(folder / "checkpoints")[-1:]
    while process.alive() and time.monotonic() < deadline:
        if checkpoint.finished(folder / "checkpoints")[-1:] != before:
            return
        time.sleep(0.05)


class TestInvocation:
    def again(self, monkeypatch, words, *, me=Launch(), **environment):  # noqa: B008 - frozen
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        monkeypatch.setattr(sys, "argv", words)
        for name in ("RANK", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return invocation.again(me, ["train", "--out", "a b"])

    def test_a_module(self, monkeypatch):
        words = ["-X", "dev", "-m", "ampwise", "train", "-m"]
        assert self.again(monkeypatch, words) == "python -X dev -m ampwise train --out 'a b'"

    def test_a_script_on_the_path(self, monkeypatch, tmp_path):
        script = tmp_path / "ampwise"
        script.write_text("")
        script.chmod(0o755)
        elsewhere = self.again(monkeypatch, [str(script), "train"], PATH="")
        assert elsewhere == f"{script} train --out 'a b'"
        found = self.again(monkeypatch, [str(script), "train"], PATH=str(tmp_path))
        assert found == "ampwise train --out 'a b'"

    def test_code_that_calls_main(self, monkeypatch):
        line = self.again(monkeypatch, ["mine.py"])
        assert line == f"{sys.executable} -m ampwise train --out 'a b'"

    def test_torchrun(self, monkeypatch, tmp_path):
        (tmp_path / "torchrun").write_text("")
        (tmp_path / "torchrun").chmod(0o755)
        ranks = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PATH": str(tmp_path)}
        here, two = Launch(0, 2, 0, 2), Launch(0, 4, 0, 2)
        words = ["-m", "ampwise", "train"]
        line = self.again(monkeypatch, words, me=here, **ranks)
        assert line == "torchrun --nproc-per-node=2 -m ampwise train --out 'a b'"
        line = self.again(monkeypatch, words, me=here, **{**ranks, "PATH": os.devnull})
        assert line.startswith(f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 ")
        line = self.again(monkeypatch, words, me=two, **ranks)
        assert line == "(on every machine, as before) ... -m ampwise train --out 'a b'"


def test_auto_is_decided_by_the_first_step_said_and_remembered(
    configs, capsys, monkeypatch, tmp_path
):
    from ampwise.policy import PRESETS, Resolution
    from ampwise.policy.resolution import GUESSED
    from ampwise.step import race

    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    guess = Resolution("auto", PRESETS["fp32"], "cpu", (GUESSED,), changed=False, guess=True)
    monkeypatch.setattr("ampwise.policy.resolve", lambda *_, **__: guess)
    monkeypatch.setattr(race, "candidates", lambda _: ([PRESETS["bf16"]], {}))
    monkeypatch.setattr(
        race._Arm, "turn_ms", lambda arm: 1.0 if arm._rerun.policy.autocast else 2.0
    )
    assert main(["train", "mine.py", "--steps", "2", "--out", "run"]) == 0
    said = "precision: auto: bf16 on cpu: raced on this step in"
    assert said in " ".join("".join(capsys.readouterr()).split())
    record = json.loads(Path("run/run.json").read_text())
    assert record["options"]["precision"] == record["config"]["precision"] == "bf16"
    assert record["policy"]["precision"] == record["result"]["precision"] == "bf16"
    steps = [json.loads(line) for line in Path("run/steps.jsonl").read_text().splitlines()]
    assert {each["amp/precision"] for each in steps if "amp/precision" in each} == {"bf16"}
    assert (
        checkpoint.load(Path("run/checkpoints/step-00000002.pt"))["config"]["precision"] == "bf16"
    )

    monkeypatch.setattr(race, "race", lambda *_: pytest.fail("raced again"))
    for again in ([], ["--precision", "auto"]):  # the state knows, too
        options = ["--resume", "--steps", str(3 + len(again))]
        assert main(["train", "mine.py", *options, *again, "--out", "run"]) == 0
        assert json.loads(Path("run/run.json").read_text())["config"]["precision"] == "bf16"
        assert "converted" not in "".join(capsys.readouterr())
