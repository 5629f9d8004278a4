"""`fp8` over two real processes (gloo), emulated: DDP and FSDP2, compiled too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.distributed import replicate, shard
from ampwise.policy import RECIPES
from tests.distributed import small
from tests.distributed.ranks import Ranks

pytest.importorskip("torchao", reason="needs ampwise[fp8]")
pytestmark = pytest.mark.filterwarnings("ignore:policy fp8.*emulated")


class Blocks(nn.Module):
    """Layers that FSDP2 gathers one after the other, and a head that does not fit float8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 32, generator=source) for _ in range(count)]
    return [(each, each[:, :5].argmax(dim=1)) for each in inputs]


def _trained(spread: str, policy: str) -> tuple[Tensor, list[float], dict[str, str]]:
    torch.manual_seed(0)
    model: Any = Blocks()
    if spread == "ddp":
        model = replicate(model, policy)
    elif spread.startswith("fsdp"):
        model = shard(model, policy)
    if spread.endswith("compiled"):
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    ranks = 1 if spread == "alone" else dist.get_world_size()
    held = list(model.parameters())
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    step = TrainStep(model, optimizer, policy=policy, accumulate=2 // ranks, max_grad_norm=0.5)
    mine = small.me() if ranks > 1 else 0
    for batch in batches(20)[mine::ranks]:
        step(loss, batch)
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    if not spread.endswith("compiled"):
        assert step.activity is not None
        assert step.activity.matmul_dtypes == {"float8_e4m3fn": 2, "bfloat16": 1}
    return small.parameters(model), [each.loss for each in step.history], step.left_out


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spread", ["ddp", "fsdp", "fsdp, compiled"])
def test_ten_steps_on_two_ranks_equal_one_process(ranks: Ranks, spread: str, recipe: str) -> None:
    # Scales follow from each micro-batch, so the same micro-batches have the same. What sums in
    # another order leaves in a weight, 2**-24 of it, may move a value over the edge between two
    # numbers of float8, 2**-3 of it apart: one in some 2**20. So losses are held, not weights.
    policy = f"fp8:recipe={recipe}"
    alone, before, left_out = ranks(_trained, "alone", policy)[0]
    assert left_out == {"head": "out_features of 5 is no multiple of 16"}
    for found, losses, same in ranks(_trained, spread, policy):
        assert same == left_out
        assert losses == pytest.approx(before, rel=1e-3)
        assert losses[-1] < 0.8 * losses[0]
        assert (found - alone).norm() < 0.01 * alone.norm()
