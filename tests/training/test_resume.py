"""Invariant 8: a run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import pytest
import torch

from ampwise.errors import CheckpointError, UsageError
from ampwise.telemetry.run import read_steps
from ampwise.training import checkpoint
from ampwise.training import loop as training
from ampwise.training.loop import train

from .small import Silent, config, task

TIMED = ("train/samples_per_s", "memory/peak_bytes")


def lines(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMED} for line in read_steps(folder)]


def final(folder) -> dict:
    return checkpoint.load(checkpoint.newest(folder / "checkpoints"))


def assert_same(one, other, path="") -> None:
    """Equal to the last bit, through any nesting."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) or (one.isnan().any() and other.isnan().any()), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    else:
        assert one == other, path


@pytest.fixture(autouse=True)
def _short_growth(monkeypatch):
    """A growth interval short enough to be in the middle of one."""
    from ampwise.step import LossScale, TrainStep

    def step(*args, **settings):
        return TrainStep(*args, **settings, loss_scale=LossScale(growth_interval=4))

    monkeypatch.setattr(training, "TrainStep", step)


@pytest.mark.parametrize("stop", [2, 5, 8, 13])  # mid-epoch, its end, mid growth interval, late
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-master", "bf16-pure",
                                       "bf16-pure:rounding=kahan"])  # fmt: skip
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, precision, stop):
    bad = (3,) if precision == "fp16" else ()
    settings = {"max_grad_norm": 1.0, "evaluate_every": 3, "warmup_steps": 6}
    train(task(bad), config(tmp_path / "whole", precision, steps=17, **settings), Silent())
    train(task(bad), config(tmp_path / "parts", precision, steps=stop, **settings), Silent())
    torch.manual_seed(99)  # whatever the process did in between
    train(
        task(bad),
        config(tmp_path / "parts", precision, steps=17, resume=True, **settings),
        Silent(),
    )
    whole, parts = final(tmp_path / "whole"), final(tmp_path / "parts")
    for each in (whole, parts):
        each["config"].pop("steps")
    assert_same(whole, parts)
    trained = [line for line in lines(tmp_path / "whole") if "train/loss" in line]
    assert trained == [line for line in lines(tmp_path / "parts") if "train/loss" in line]
    if precision == "fp16":
        assert whole["step"]["skipped"] > 0
        assert whole["step"]["growths"] > 0


def test_accumulation_windows_and_a_short_one_at_the_end_of_an_epoch(tmp_path):
    for name, steps in (("whole", (9,)), ("parts", (4, 9))):
        for index, count in enumerate(steps):
            settings = {"steps": count, "accumulate": 2, "resume": index > 0}
            train(task(), config(tmp_path / name, **settings), Silent())
    assert torch.equal(
        final(tmp_path / "whole")["model"]["0.weight"],
        final(tmp_path / "parts")["model"]["0.weight"],
    )


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16-master", "fp32"),
                                               ("fp32", "bf16-master"), ("bf16", "fp16")])  # fmt: skip
def test_resuming_in_another_precision_converts_and_says_so(tmp_path, before, after):
    train(task(), config(tmp_path / "run", before, steps=4), Silent())
    saved = final(tmp_path / "run")["model"]["0.weight"]
    assert saved.dtype == torch.float32
    progress = Silent()
    result = train(task(), config(tmp_path / "run", after, steps=6, resume=True), progress)
    assert result.steps == 6
    assert any(f"converted from {before} to {after}" in each for each in progress.messages)
    if after == "fp16":
        assert result.loss_scale == 65536


KAHAN = "bf16-pure:rounding=kahan"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("fp32", "bf16-pure", "are rounded to bfloat16"),
        ("bf16-pure", "fp32", "are raised to float32"),
        (KAHAN, "bf16", "are raised to float32"),
        (KAHAN, "bf16-pure", "stay bfloat16"),
        ("bf16-pure", KAHAN, "stay bfloat16"),
    ],
)
def test_bfloat16_weights_are_resumed_as_float32_and_back(tmp_path, before, after, words):
    from ampwise.policy import Policy

    train(task(), config(tmp_path / "run", before, steps=4), Silent())
    saved = final(tmp_path / "run")
    assert saved["config"]["precision"] == before
    progress = Silent()
    train(task(), config(tmp_path / "run", after, steps=5, resume=True), progress)
    told = f"converted from {before} to {after}: weights and optimizer state {words}"
    assert any(told in each for each in progress.messages)
    now = final(tmp_path / "run")
    for content, precision in ((saved, before), (now, after)):
        pure = Policy.parse(precision).pure
        held = [content["model"]["0.weight"], content["optimizer"]["state"][0]["exp_avg_sq"]]
        dtype = torch.bfloat16 if pure else torch.float32
        assert [each.dtype for each in held] == [dtype, dtype]
        assert content["model"]["1.weight"].dtype == torch.float32
        kept = "kahan" in content["optimizer"]["state"][0]
        assert kept == (precision == KAHAN)
    # One step of AdamW at 1e-2, rounded to 8 bits of weights below 1.
    moved = now["model"]["0.weight"].float() - saved["model"]["0.weight"].float()
    assert moved.abs().max() < 0.02


def test_what_kahan_rounding_kept_is_added_to_float32_weights():
    from ampwise.step.precision import settle

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"kahan": torch.full((3,), 2.0**-10), "other": torch.zeros(3)}
    settle(optimizer)
    assert (parameter == 1 + 2.0**-10).all()
    assert list(optimizer.state[parameter]) == ["other"]


def test_lines_after_the_checkpoint_are_cut_off_and_a_torn_one_is_mended(tmp_path):
    train(task(), config(tmp_path / "run", steps=4), Silent())
    with (tmp_path / "run" / "steps.jsonl").open("a") as file:
        file.write('{"step": 5, "train/loss": 1.0}\n{"step": 6, "train/l')
    train(task(), config(tmp_path / "run", steps=6, resume=True), Silent())
    steps = [line["step"] for line in lines(tmp_path / "run") if "train/loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


class TestBadCheckpoints:
    @pytest.fixture
    def run(self, tmp_path):
        train(task(), config(tmp_path / "run", steps=4, checkpoint_every=2), Silent())
        return tmp_path / "run"

    def resume(self, run, **settings):
        return train(task(), config(run, steps=6, resume=True, **settings), Silent())

    def test_a_damaged_one_names_another(self, run):
        path = checkpoint.newest(run / "checkpoints")
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(CheckpointError, match=r"is damaged .*; try .*step-00000002.pt"):
            self.resume(run)

    def test_a_foreign_one(self, run):
        torch.save({"model": 1}, checkpoint.newest(run / "checkpoints"))
        with pytest.raises(CheckpointError, match="is no checkpoint of ampwise"):
            self.resume(run)

    def test_code_in_a_checkpoint_is_not_run(self, run):
        class Evil:
            def __reduce__(self):
                return (print, ("run!",))

        torch.save({"ampwise_checkpoint": Evil()}, checkpoint.newest(run / "checkpoints"))
        with pytest.raises(CheckpointError, match="is damaged"):
            self.resume(run)

    def test_an_old_one(self, run):
        path = checkpoint.newest(run / "checkpoints")
        torch.save({**checkpoint.load(path), "ampwise_checkpoint": 0}, path)
        with pytest.raises(CheckpointError, match="has version 0, this ampwise reads version 1"):
            self.resume(run)

    def test_one_of_another_model(self, run):
        path = checkpoint.newest(run / "checkpoints")
        content = checkpoint.load(path)
        content["model"]["0.weight"] = torch.zeros(3, 3)
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="does not fit this task's model"):
            self.resume(run)

    def test_nothing_to_resume(self, tmp_path):
        with pytest.raises(UsageError, match="nothing to resume"):
            self.resume(tmp_path / "nowhere")

    def test_only_the_last_three_are_kept(self, tmp_path):
        train(task(), config(tmp_path / "run", steps=9, checkpoint_every=1), Silent())
        kept = [path.name for path in checkpoint.finished(tmp_path / "run" / "checkpoints")]
        assert kept == [f"step-0000000{step}.pt" for step in (7, 8, 9)]
