"""A task with an iteration on two ranks: what one process makes of the batches of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampwise import TrainStep
from ampwise.distributed import shard
from ampwise.training import checkpoint
from tests.distributed import small
from tests.distributed.commands import Command
from tests.distributed.ranks import Ranks

TASK = """
import torch
from torch import nn
from torch.nn.functional import softplus
from ampwise import Task

def task(ranks: int = 1, fault: bool = False, batches: int = 7):
    source = torch.Generator().manual_seed(1)
    data = [torch.randn(6, 2, 8, generator=source) for _ in range(batches)]

    def dealt():
        # One process takes together what the ranks take each in a turn; the seventh is left over.
        for start in range(0, len(data) - 1 if ranks == 1 else len(data), 2 // ranks):
            yield torch.cat(data[start : start + 2 // ranks])

    def models():
        return {"generator": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
                "critic": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))}

    def optimizers(models):
        return {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}

    def iteration(step, batch):
        generator, critic = step.model["generator"], step.model["critic"]
        real, noise = batch.unbind(1)
        with step.autocast():
            fake = generator(noise)
            loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).mean()
        step.backward(loss, optimizers=[step.optimizer["critic"]])
        step.update([step.optimizer["critic"]])
        with step.autocast():
            logits = critic(fake)
            if fault:
                logits = (logits - logits.max()).clamp(min=0).log()
            fooled = softplus(-logits).mean()
        step.backward(fooled, optimizers=[step.optimizer["generator"]])
        step.update([step.optimizer["generator"]])
        return loss + fooled.detach()

    return Task(model=models, batches=dealt, iteration=iteration, optimizer=optimizers, name="two")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "two.py").write_text(TASK)
    return tmp_path


TRAIN = ("train", "two.py", "--precision", "fp32", "--steps", "5", "--watch-every", "1")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process_with_their_batches_together(
    folder: Path, parallel: str
) -> None:
    """With ``--watch-every 1`` the ranks compare their parameters after each step."""
    runs = {
        "both": Command(
            folder, *TRAIN, "--set", "ranks=2", "--parallel", parallel, "--out", "both"
        ),
        "one": Command(folder, *TRAIN, "--out", "one", ranks=1),
    }
    for each in runs.values():
        assert set(each.finish()) == {0}, each.err
    ends = [checkpoint.load(checkpoint.newest(folder / name / "checkpoints")) for name in runs]
    assert ends[0]["world_size"] == 2
    for name, expected in ends[1]["model"].items():
        torch.testing.assert_close(ends[0]["model"][name], expected, rtol=0, atol=1e-6)
    losses = [each["config"]["batch_size"] for each in ends]
    assert losses == [6, 12]


def _leftover() -> int:
    # One unit each: what is the root's stays gathered between forward and backward.
    generator, critic = (shard(nn.Sequential(nn.Linear(8, width))) for width in (8, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    step = TrainStep([generator, critic], optimizers, policy="fp32")
    of_generator, of_critic = optimizers
    left = 0
    for _ in range(2):
        with step.autocast():
            fake = generator(torch.ones(4, small.FEATURES))
            loss = (critic(fake.detach()) - critic(torch.zeros_like(fake))).mean()
        step.backward(loss, optimizers=[of_critic])
        step.update([of_critic], update_scale=False)
        with step.autocast():
            loss = critic(fake).mean()
        step.backward(loss, optimizers=[of_generator])
        step.update([of_generator])
        left += sum(each.grad is not None for each in of_critic.param_groups[0]["params"])
    return left


def test_a_backward_through_a_sharded_model_leaves_it_no_gradients(ranks: Ranks) -> None:
    """Between forward and backward its modules hold other parameters than its optimizer."""
    assert ranks(_leftover) == [0, 0]


def test_a_fault_after_an_update_is_found_on_ranks(folder: Path) -> None:
    run = Command(folder, "diagnose", "two.py", "--precision", "bf16", "--steps", "2",
                  "--set", "ranks=2", "--set", "fault=true", "--out", "out")  # fmt: skip
    assert run.finish() == [1, 1], run.err
    assert "DOMAIN_ERROR at step 1, forward: log" in run.out


def test_an_epoch_without_a_batch_for_each_rank_is_said(folder: Path) -> None:
    run = Command(folder, *TRAIN, "--set", "ranks=2", "--set", "batches=1", "--out", "out")
    assert run.finish() == [2, 2]
    assert "fewer batches than there are ranks" in run.err
