"""A run resumed with other settings: what differs is named, refused, or in force from there on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from ampwise import Task
from ampwise.cli.main import main
from ampwise.errors import UsageError
from ampwise.telemetry.run import read_steps
from ampwise.training import checkpoint
from ampwise.training.changes import differences, makeup
from ampwise.training.loop import train
from ampwise_lint.base.words import counted

from .small import Silent, config

SAMPLES = 40


class Counted:
    """Data that is shuffled, a model without dropout, and a note of what was trained on.

    Attributes
    ----------
    seen
        Samples of each batch, by number.
    data
        Number, features and label of each.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], Optimizer] | None = None,
        batch_size: int = 8,
        weight: float = 1.0,
    ) -> None:
        self.seen: list[list[int]] = []
        self._weight = weight
        source = torch.Generator().manual_seed(0)
        features = torch.randn(SAMPLES, 8, generator=source)
        labels = torch.randint(0, 4, (SAMPLES,), generator=source)
        self.data = data = TensorDataset(torch.arange(SAMPLES), features, labels)
        self.task = Task(
            name="counted",
            model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
            batches=lambda: DataLoader(data, batch_size, shuffle=True),
            loss=self._loss,
            optimizer=lambda model: (optimizer or adamw())(model.parameters()),
        )

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        numbers, features, labels = batch
        self.seen.append(numbers.tolist())
        return self._weight * F.cross_entropy(model(features), labels)


def adamw(lr: Any = 1e-2, **settings: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: AdamW(parameters, lr=lr, fused=True, **settings)


def run(folder: Path, steps: int, counted: Counted | None = None, **settings: Any) -> Silent:
    """Train up to a step, resuming what is there; what was said."""
    progress = Silent()
    resume = (folder / "run.json").exists()
    arguments = config(folder, steps=steps, resume=resume, **settings)
    train((counted or Counted()).task, arguments, progress)
    return progress


def saved(folder: Path) -> dict[str, Any]:
    path = checkpoint.newest(folder / "checkpoints")
    assert path is not None
    return checkpoint.load(path)


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def rates(folder: Path) -> list[float]:
    return [line["train/lr"] for line in read_steps(folder) if "train/lr" in line]


# -- refused ---------------------------------------------------------------------------------------


def test_all_that_differs_is_named_line_by_line_and_nothing_is_touched(tmp_path):
    first = {"accumulate": 2, "schedule": "cosine"}
    run(tmp_path, 4, **first)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = Counted(adamw(1e-1, weight_decay=0.5), batch_size=10)
    with pytest.raises(UsageError) as refused:
        run(tmp_path, 6, other, schedule="cosine", max_grad_norm=1.0, warmup_steps=1, seed=7)
    head, *lines, advice = str(refused.value).splitlines()
    path = tmp_path / "checkpoints" / "step-00000004.pt"
    assert head == f"{path} is of a run that was set up otherwise:"
    assert lines == [
        "  batch size: 8 in the checkpoint, 10 now",
        "  accumulate: 2 in the checkpoint, 1 now",
        "  max grad norm: none in the checkpoint, 1.0 now",
        "  seed: 0 in the checkpoint, 7 now",
        "  warmup steps: 0 in the checkpoint, 1 now",
        "  steps of the schedule: 4 in the checkpoint, 6 now",
        "  learning rate: 0.01 in the checkpoint, 0.1 now",
        "  weight decay: 0.01 in the checkpoint, 0.5 now",
    ]
    assert advice == (
        "give the values of the checkpoint to continue that run, or --allow-changes to go on with "
        "the new ones"
    )
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert refused.value.exit_code == 2


def test_more_steps_at_a_constant_rate_or_another_precision_need_no_leave(tmp_path):
    run(tmp_path, 2, warmup_steps=3)
    assert "changed" not in str(run(tmp_path, 4, warmup_steps=3).messages)
    progress = Silent()
    train(Counted().task, config(tmp_path, "bf16", steps=6, warmup_steps=3, resume=True), progress)
    assert progress.messages[0].startswith("converted from fp32 to bf16: ")
    assert saved(tmp_path)["config"]["changes"] == []


def grouped(*rates: float) -> Callable[[Any], Optimizer]:
    def optimizer(parameters: Any) -> Optimizer:
        shared = np.array_split(np.arange(4), len(rates))
        held = list(parameters)
        groups = zip(rates, shared, strict=True)
        return AdamW([{"params": [held[i] for i in which], "lr": lr} for lr, which in groups])

    return optimizer


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (adamw(), lambda p: SGD(p, lr=1.0), ["optimizer: AdamW in the checkpoint, SGD now",
                                             "optimizer state: starts anew"]),
        (lambda p: SGD(p, lr=1.0), lambda p: SGD(p, lr=1.0, momentum=0.9),
         ["momentum: 0 in the checkpoint, 0.9 now", "optimizer state: starts anew"]),
        (lambda p: SGD(p, lr=1.0, momentum=0.9), lambda p: SGD(p, lr=1.0),
         ["momentum: 0.9 in the checkpoint, 0 now"]),
        (grouped(0.1, 0.2), grouped(0.1, 0.3),
         ["learning rate of parameter group 2: 0.2 in the checkpoint, 0.3 now"]),
        (grouped(0.1, 0.2), grouped(0.1), ["parameter groups: 2 in the checkpoint, 1 now",
                                           "optimizer state: starts anew"]),
        (adamw(), lambda p: AdamW(p, lr=1e-2, foreach=True), []),
        (adamw(), lambda p: AdamW([{"params": p, "lr": 1e-3, "initial_lr": 1e-2}]), []),
        (adamw(np.float64(1e-2)), adamw(torch.tensor(1e-2, dtype=torch.float64)), []),
        (adamw(betas=(0.9, 0.99)), adamw(betas=(0.8, 0.99)),
         ["betas: [0.9, 0.99] in the checkpoint, [0.8, 0.99] now"]),
    ],
)  # fmt: skip
def test_optimizers_are_compared_by_class_groups_and_values(before, now, said):
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(4)]
    kinds = [
        makeup(Counted().task, config(None, steps=1), optimizer(parameters), 8)
        for optimizer in (before, now)
    ]
    assert differences(*kinds) == said


def test_values_are_those_before_the_schedule(tmp_path):
    run(tmp_path, 3, schedule="cosine", warmup_steps=2)
    assert saved(tmp_path)["config"]["hyperparameters"][0]["lr"] == 1e-2
    assert saved(tmp_path)["optimizer"]["param_groups"][0]["lr"] != 1e-2


def test_facts_of_the_task_are_compared(tmp_path):
    wide, narrow = (replace(Counted().task, info={"width": width}) for width in (16, 8))
    train(wide, config(tmp_path, steps=1), Silent())
    with pytest.raises(UsageError, match="\n  width of the task: 16 in the checkpoint, 8 now\n"):
        train(narrow, config(tmp_path, steps=2, resume=True), Silent())


FILE = """
import torch
from ampwise import Task

def task(lr: float = 0.01):
    return Task(
        lambda: torch.nn.Linear(4, 1), lambda: [torch.ones(2, 4)] * 4,
        lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr), name="file")
"""


def test_the_command_refuses_with_2_and_goes_on_when_allowed(tmp_path, monkeypatch, capsys):
    (tmp_path / "file.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    command = ["train", "file.py", "--precision", "fp32", "--out", "run", "--device", "cpu"]
    assert main([*command, "--steps", "1"]) == 0
    again = [*command, "--steps", "2", "--resume", "--set", "lr=0.5"]
    capsys.readouterr()
    assert main(again) == 2
    said = capsys.readouterr().err
    assert "\n  learning rate: 0.01 in the checkpoint, 0.5 now\n" in said
    assert said.endswith("--allow-changes to go on with the new ones\n")
    assert main([*again, "--allow-changes"]) == 0
    assert rates(tmp_path / "run") == [0.01, 0.5]


# -- allowed ---------------------------------------------------------------------------------------


def test_allowed_changes_are_said_and_stay_in_the_record(tmp_path):
    run(tmp_path, 1)
    said = run(tmp_path, 2, Counted(adamw(1e-1)), accumulate=2, allow_changes=True).messages
    expected = [
        "changed at step 1: accumulate: 1 in the checkpoint, 2 now",
        "changed at step 1: learning rate: 0.01 in the checkpoint, 0.1 now",
    ]
    assert said[:2] == expected
    later = run(tmp_path, 3, Counted(adamw(1e-1)), accumulate=2).messages
    assert "changed" not in str(later)
    record = json.loads((tmp_path / "run.json").read_text())["config"]
    assert record["changes"] == saved(tmp_path)["config"]["changes"] == expected
    assert (record["accumulate"], record["hyperparameters"][0]["lr"]) == (2, 0.1)


def by_hand(steps: int, changed_at: int, change: Callable[[Optimizer], Optimizer]) -> Any:
    """What plain PyTorch makes of a run whose optimizer changes after some steps."""
    counted = Counted()
    torch.manual_seed(0)
    model = counted.task.model()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    batches = list(counted.task.batches())
    for index in range(steps):
        if index == changed_at:
            optimizer = change(optimizer)
        optimizer.zero_grad()
        counted.task.loss(model, batches[index]).backward()
        optimizer.step()
    return model.state_dict()


def assert_trained_to(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in saved(folder)["model"].items():
        assert torch.equal(tensor, expected[name]), name


def test_new_hyperparameters_are_in_force_and_moments_are_kept(tmp_path):
    def change(optimizer: Optimizer) -> Optimizer:
        optimizer.param_groups[0] |= {"lr": 1e-1, "weight_decay": 0.5, "betas": (0.8, 0.9)}
        return optimizer

    run(tmp_path, 2)
    new = adamw(1e-1, weight_decay=0.5, betas=(0.8, 0.9))
    run(tmp_path, 4, Counted(new), allow_changes=True)
    assert_trained_to(tmp_path, by_hand(4, 2, change))


def test_an_optimizer_of_another_class_starts_anew(tmp_path):
    run(tmp_path, 2)
    said = run(tmp_path, 4, Counted(lambda p: RMSprop(p, lr=1e-3)), allow_changes=True).messages
    assert said[1] == "changed at step 2: optimizer state: starts anew"
    held = [each["params"] for each in saved(tmp_path)["optimizer"]["param_groups"]]
    assert held == [[0, 1, 2, 3]]
    assert_trained_to(
        tmp_path, by_hand(4, 2, lambda old: RMSprop(old.param_groups[0]["params"], lr=1e-3))
    )


def test_momentum_that_is_turned_on_finds_the_state_it_needs(tmp_path):
    run(tmp_path, 2, Counted(lambda p: RMSprop(p, lr=1e-3)))
    on = Counted(lambda p: RMSprop(p, lr=1e-3, momentum=0.9, centered=True))
    run(tmp_path, 4, on, allow_changes=True)
    assert set(saved(tmp_path)["optimizer"]["state"][0]) >= {"momentum_buffer", "grad_avg"}


def cosine(step: int, steps: int, warmup: int = 0, lr: float = 1e-2) -> float:
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


@pytest.mark.parametrize(
    ("before", "now", "lr", "expected"),
    [
        ({"schedule": "cosine"}, {"schedule": "cosine"}, 1e-2, lambda step: cosine(step, 6)),
        ({}, {"schedule": "cosine", "warmup_steps": 2}, 1e-2, lambda step: cosine(step, 6, 2)),
        ({"schedule": "cosine"}, {}, 1e-2, lambda step: 1e-2),
        ({}, {}, 5e-2, lambda step: 5e-2),
        ({"schedule": "cosine"}, {"schedule": "cosine"}, 5e-2, lambda s: cosine(s, 6, lr=5e-2)),
        ({"warmup_steps": 2}, {"warmup_steps": 5}, 1e-2, lambda step: 1e-2 * (step + 1) / 6),
        ({"warmup_steps": 5}, {"warmup_steps": 5}, 5e-2, lambda step: 5e-2 * (step + 1) / 6),
    ],
)
@pytest.mark.parametrize("skipped", [0, 1])
def test_another_schedule_goes_on_at_the_same_step(
    tmp_path, before, now, lr, expected, skipped, recwarn
):
    weight = math.inf if skipped else 1.0
    run(tmp_path, 1, Counted(weight=weight), **before)
    run(tmp_path, 3, **before, allow_changes=True)
    run(tmp_path, 6, Counted(adamw(lr)), **now, allow_changes=True)
    assert rates(tmp_path)[3:] == pytest.approx([expected(s - skipped) for s in (3, 4, 5)])
    assert not [each for each in recwarn if "scheduler" in str(each.message)]
    # From then on it is a run of its own.
    run(tmp_path, 7, Counted(adamw(lr)), **now, allow_changes=now.get("schedule") == "cosine")


def test_a_new_seed_draws_other_numbers_but_the_epoch_keeps_its_order(tmp_path):
    whole = Counted()
    run(tmp_path / "whole", 10, whole)
    drawn = []
    for folder in ("one", "other"):
        run(tmp_path / folder, 2)
        counted = Counted()
        run(tmp_path / folder, 10, counted, seed=5, allow_changes=True)
        assert counted.seen[:3] == whole.seen[2:5]
        drawn.append(counted.seen[3:])
    assert drawn[0] == drawn[1] != whole.seen[5:]


# -- where it is in its data -----------------------------------------------------------------------


def test_an_epoch_goes_on_at_the_sample_where_it_was(tmp_path):
    first, second, whole = Counted(), Counted(batch_size=4), Counted(batch_size=40)
    run(tmp_path / "run", 2, first)
    said = run(tmp_path / "run", 8, second, allow_changes=True).messages
    run(tmp_path / "whole", 1, whole)
    assert flat(first.seen + second.seen) == whole.seen[0]
    assert "trained on again" not in str(said)
    assert saved(tmp_path / "run")["position"]["samples"] == SAMPLES


def test_samples_that_do_not_fill_a_batch_are_trained_on_again_and_counted(tmp_path):
    first, second = Counted(), Counted(batch_size=6)
    run(tmp_path, 2, first)
    said = run(tmp_path, 3, second, allow_changes=True).messages
    assert "trained on again: 4 samples, too few for a batch of 6" in said
    assert second.seen[0][:4] == flat(first.seen)[12:]
    assert saved(tmp_path)["position"]["samples"] == 18
    third = Counted(batch_size=6)
    run(tmp_path, 4, third)
    assert set(third.seen[0]).isdisjoint(flat(first.seen + second.seen))


def test_an_epoch_of_which_no_batch_is_full_begins_anew(tmp_path):
    second = Counted(batch_size=24)
    run(tmp_path, 2)
    said = run(tmp_path, 4, second, allow_changes=True).messages
    assert "the epoch begins anew, with 16 samples, too few for a batch of 24" in said
    assert sorted(flat(second.seen)) == list(range(SAMPLES))


def uneven(pieces: int) -> Counted:
    """Batches of random sizes, in the order of the samples."""
    counted = Counted()

    def batches() -> list[Any]:
        cuts = (torch.randperm(SAMPLES - pieces)[: pieces - 1] + 1).sort().values
        return list(zip(*(each.tensor_split(cuts) for each in counted.data.tensors), strict=True))

    counted.task = replace(counted.task, batches=batches)
    return counted


def test_batches_of_any_size_are_counted_as_their_epoch_has_them(tmp_path):
    first, second = uneven(pieces=12), uneven(pieces=8)
    run(tmp_path, 16, first)  # into the second epoch
    said = str(run(tmp_path, 18, second, allow_changes=True).messages)
    at, again = flat(first.seen)[-1] + 1, flat(second.seen)[0]
    assert "batch size: " in said
    assert again + len(second.seen[0]) > at > again
    assert f"trained on again: {counted(at - again, 'sample')}" in said
    assert saved(tmp_path)["position"]["samples"] == flat(second.seen)[-1] + 1


def test_samples_are_counted_as_the_task_counts_them(tmp_path):
    tokens = replace(Counted().task, samples=lambda batch: 10 * len(batch[0]))
    train(tokens, config(tmp_path, steps=2), Silent())
    assert saved(tmp_path)["position"]["samples"] == 160
    assert saved(tmp_path)["config"]["batch_size"] == 80


def test_the_first_batch_of_a_run_is_the_same_one_each_time(tmp_path):
    """Batches of any size are no change of the batch size."""

    def batches() -> list[Any]:
        rows = int(torch.randint(1, 1000, ()))
        return [(torch.zeros(rows), torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.long))] * 9

    for steps in (1, 2):
        torch.manual_seed(steps)  # whatever the process did before
        uneven = replace(Counted().task, batches=batches)
        train(uneven, config(tmp_path, steps=steps, resume=steps > 1), Silent())


def test_an_older_checkpoint_is_compared_in_what_it_remembers(tmp_path):
    run(tmp_path, 2)
    path = checkpoint.newest(tmp_path / "checkpoints")
    content = copy.deepcopy(saved(tmp_path))
    old = {"task", "precision", "device", "steps", "epochs", "accumulate", "max_grad_norm",
           "schedule", "warmup_steps", "seed"}  # fmt: skip
    content["config"] = {key: content["config"][key] for key in old}
    del content["position"]["samples"]
    torch.save(content, path)
    with pytest.raises(UsageError, match="otherwise:\n  seed: 0 in the checkpoint, 1 now\ngive"):
        run(tmp_path, 4, seed=1)
    run(tmp_path, 4, Counted(lambda p: AdamW(p, lr=1e-1)))
    assert saved(tmp_path)["position"]["samples"] == 32
