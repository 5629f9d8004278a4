"""The example of a loop with two models: what each command says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ampwise import diagnose, load_task
from ampwise.cli.main import main
from ampwise.telemetry.run import read_steps

GAN = Path(__file__).parents[1] / "examples" / "gan.py"


def line(text: str) -> int:
    (found,) = [n for n, each in enumerate(GAN.read_text().splitlines(), 1) if text in each]
    return found


def ampwise(command: str, *arguments: str, code: int = 0) -> None:
    assert main([command, str(GAN), "--quiet", *arguments]) == code


def model(run: Path, step: int) -> dict[str, torch.Tensor]:
    content = torch.load(run / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)
    return content["model"]


def test_it_trains_and_a_resumed_run_is_the_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train = ("--precision", "fp16", "--allow-emulated", "--schedule", "cosine", "--seed", "1")
    ampwise("train", *train, "--steps", "60", "--out", str(whole))
    ampwise("train", *train, "--steps", "60", "--checkpoint-every", "30", "--out", str(parts))
    (parts / "checkpoints" / "step-00000060.pt").unlink()
    ampwise("train", *train, "--steps", "60", "--resume", "--out", str(parts))
    ends = model(whole, 60), model(parts, 60)
    assert ends[0].keys() == ends[1].keys() > {"generator.0.weight", "discriminator.head.weight"}
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    evaluated = [each["eval/distance"] for each in read_steps(whole) if "eval/distance" in each]
    assert evaluated[-1] < 0.5 * evaluated[0]  # energy distance to held-out digits


def test_a_gradient_penalty_trains_too(tmp_path):
    out = tmp_path / "run"
    ampwise("train", "--precision", "bf16", "--allow-emulated", "--set", "penalty=true",
            "--steps", "40", "--out", str(out))  # fmt: skip
    result = json.loads((out / "run.json").read_text())["result"]
    assert result["skipped_steps"] == 0
    assert result["metrics"]["distance"] < 5


@pytest.mark.parametrize("steps", [1, 3])
def test_its_planted_fault_is_found_where_it_is(steps):
    found = diagnose(load_task(str(GAN), {"fault": "true"}), "fp16", steps=steps)
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert found.origin is not None
    assert (found.origin.op, found.origin.module) == ("mul", "discriminator")
    assert found.origin.line == line("(large * large)")
    assert "loss 1 of 2 is" in found.explanation
    assert any(each.verified and "bf16" in each.how for each in found.fixes)


@pytest.mark.slow
def test_a_patch_of_it_is_tried_in_a_fresh_process(tmp_path):
    file = tmp_path / "diagnosis.json"
    ampwise("diagnose", "--precision", "fp16", "--set", "fault=true", "--steps", "3",
            "--out", str(tmp_path / "out"), "--json", str(file), code=1)  # fmt: skip
    fixes = json.loads(file.read_text())["fixes"]
    assert any(each["verified"] and "large.float()" in (each["patch"] or "") for each in fixes)


def test_bench_measures_both_sides_of_it(tmp_path):
    file = tmp_path / "bench.json"
    ampwise("bench", "--precisions", "bf16", "--steps", "3", "--seeds", "2", "--parity-steps", "4",
            "--out", str(tmp_path / "out"), "--json", str(file))  # fmt: skip
    fp32, bf16 = json.loads(file.read_text())["precisions"]
    assert bf16["status"] == "measured"
    assert bf16["accuracy"]["metric"] == "distance"
    for each in (fp32, bf16):
        assert sum(each["memory"].values()) == each["peak_memory_bytes"]
        assert each["memory"]["activations"] > 0
    assert bf16["memory"]["autocast cache"] > 0


def test_verify_finds_nothing_that_fails(tmp_path):
    file = tmp_path / "verify.json"
    ampwise("verify", "--no-bench", "--out", str(tmp_path / "out"), "--json", str(file))
    found = {each["id"]: each for each in json.loads(file.read_text())["findings"]}
    by_bench = {"speedup", "memory_reduction", "accuracy_difference"}
    mechanisms = {name: each["status"] for name, each in found.items() if name not in by_bench}
    assert set(mechanisms.values()) <= {"pass", "not applicable"}, mechanisms


@pytest.mark.parametrize("command", ["train", "bench"])
def test_accumulation_is_refused_in_a_line(command, capsys):
    assert main([command, str(GAN), "--accumulate", "2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("ampwise: error: accumulate=2: task gan gives an iteration")
