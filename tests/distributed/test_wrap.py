"""`replicate` and `shard`: a policy's dtypes on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.distributed import replicate, shard
from ampwise.errors import PolicyError, UsageError
from tests.distributed import small
from tests.distributed.ranks import Ranks
from tests.distributed.small import Spread


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.head(self.norm(inputs))


def _made(spread: Spread, policy: str) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks()
    if spread == "alone":
        return model
    return replicate(model, policy) if spread == "ddp" else shard(model, policy)


def _trained(spread: Spread, policy: str, accumulate: int) -> dict[str, Any]:
    model = _made(spread, policy)
    ranks = 1 if spread == "alone" else 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TrainStep(model, optimizer, policy=policy, accumulate=accumulate * (2 // ranks))
    mine = small.me() if ranks > 1 else 0
    for batch in small.batches(20 * accumulate)[mine::ranks]:
        step(small.loss, batch)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state = {name: small.whole(value) for name, value in inner.state_dict().items()}
    return {
        "weights": torch.cat([each.flatten().float() for each in state.values()]),
        "saved": {str(value.dtype) for value in state.values()},
        "held": {str(each.dtype) for each in inner.blocks.parameters()},
        "losses": [each.loss for each in step.history],
        "ran": set(step.activity.matmul_dtypes),
    }


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_bf16_master_trains_as_one_process_does(
    ranks: Ranks, spread: Spread, accumulate: int
) -> None:
    alone = ranks(_trained, "alone", "bf16-master", accumulate)[0]
    for found in ranks(_trained, spread, "bf16-master", accumulate):
        assert found["saved"] == {"torch.float32"}
        assert found["held"] == {"torch.float32"}
        assert found["ran"] == {"bfloat16"}
        # Gradients are bfloat16 numbers: 10 steps of at most lr = 1e-3, each off by 2**-8 of
        # itself; where a gradient's sign is in doubt AdamW's first steps go all the way.
        assert (found["weights"] - alone["weights"]).abs().mean() < 10 * 1e-3 * 2**-8 * 2
        assert found["losses"] == pytest.approx(alone["losses"], abs=5e-3)


def _in_parts(spread: Spread) -> Tensor:
    """Parameters after a window of eight losses, the same ones on all ranks."""
    model = _made(spread, "bf16-master")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = TrainStep(model, optimizer, policy="bf16-master", accumulate=8)
    for batch in small.batches(8):
        with step.autocast():
            loss = small.loss(model, batch)
        step.backward(loss)
    step.update()
    return torch.cat([each.flatten() for each in model.state_dict().values()])


def test_the_parts_of_a_window_are_collected_in_float32(ranks: Ranks) -> None:
    # The mean over two ranks of the same bfloat16 numbers is exact.
    alone = ranks(_in_parts, "alone")[0]
    for found in ranks(_in_parts, "ddp"):
        assert torch.equal(found, alone)


def _in_windows_of_two() -> tuple[nn.Module, TrainStep]:
    model = _made("ddp", "bf16-master")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, TrainStep(model, optimizer, policy="bf16-master", accumulate=2)


def _through_a_window(interrupted: bool) -> tuple[float, Tensor]:
    """Norm and outcome of a window, saved and loaded in its middle or not."""
    first, last = small.batches(4)[small.me() :: 2]
    model, step = _in_windows_of_two()
    step(small.loss, first)
    if interrupted:
        state = step.state_dict()
        model, step = _in_windows_of_two()
        step.load_state_dict(state)
    step(small.loss, last)
    parameters = torch.cat([each.flatten() for each in model.state_dict().values()])
    return step.history[-1].grad_norm, parameters


def test_what_was_collected_before_an_interruption_is_summed_after_it(ranks: Ranks) -> None:
    whole, parts = ranks(_through_a_window, False), ranks(_through_a_window, True)
    for (norm, expected), (found_norm, found) in zip(whole, parts, strict=True):
        assert found_norm == norm > 0
        assert torch.equal(found, expected)


def _mean_of(dtype: str, parameters: str) -> tuple[float, list[str]]:
    """Relative error of a gradient that DDP averaged, and the dtypes that went over the wire."""
    model = nn.Linear(512, 1, bias=False)
    copied = replicate(model, f"{parameters}:reduce={dtype}")
    sent: list[str] = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(str(tensor.dtype))
        return original(tensor, *args, **kwargs)

    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(2, 4, 512, generator=source)
    dist.all_reduce = noting
    try:
        copied(inputs[small.me()].to(next(model.parameters()).dtype)).sum().backward()
    finally:
        dist.all_reduce = original
    exact = inputs.double().sum(1).mean(0)
    error = (next(model.parameters()).grad.double() - exact).norm() / exact.norm()
    return float(error), sent


def test_the_dtype_of_sums_is_the_policys(ranks: Ranks) -> None:
    error, sent = ranks(_mean_of, "bf16", "bf16")[0]
    assert sent == ["torch.bfloat16"]
    assert 2**-11 < error < 2**-8
    error, sent = ranks(_mean_of, "fp32", "bf16")[0]
    assert sent == []  # DDP's own sum, in the gradient's dtype
    assert error < 1e-6
    assert ranks(_mean_of, "bf16", "bf16-master")[0][1] == ["torch.bfloat16"]
    assert ranks(_mean_of, "fp32", "bf16-master")[0][1] == []


def _dtypes_of_units(policy: str) -> dict[str, tuple[str, str]]:
    model = shard(Blocks(), policy)
    found: dict[str, tuple[str, str]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            found[name] = (str(next(module.parameters(recurse=False)).dtype), "")

        return hook

    for name in ("blocks.0", "norm", "head"):
        model.get_submodule(name).register_forward_pre_hook(note(name))
    step = TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), policy=policy
    )
    step(small.loss, small.batches(1)[0])
    return {name: kinds[0] for name, kinds in found.items()}


def test_islands_are_units_of_their_own_in_float32(ranks: Ranks) -> None:
    found = ranks(_dtypes_of_units, "bf16-master:islands=head")[0]
    assert found == {
        "blocks.0": "torch.bfloat16",
        "norm": "torch.bfloat16",
        "head": "torch.float32",
    }


def _refused(policy: str) -> str:
    try:
        replicate(Blocks(), policy)
    except PolicyError as error:
        return str(error)
    return ""


def test_what_cannot_work_is_refused_and_says_what_to_do(ranks: Ranks) -> None:
    assert "reduce=bf16" in ranks(_refused, "fp16:reduce=fp16")[0]


def _head_only(plain: bool) -> dict[str, Tensor]:
    """Fine-tune the head under bf16-master: parameters by name."""
    torch.manual_seed(0)
    model = Blocks()
    model.blocks.requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel
    trained = ddp(model) if plain else replicate(model, "bf16-master")
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    step = TrainStep(trained, optimizer, policy="bf16-master")
    for batch in small.batches(3):
        step(small.loss, batch)
    return {name: each.detach() for name, each in model.named_parameters()}


def test_bf16_master_works_over_plain_ddp_as_over_replicate(ranks: Ranks) -> None:
    before = Blocks()
    for plain, made in zip(ranks(_head_only, True), ranks(_head_only, False), strict=True):
        assert {each.dtype for each in plain.values()} == {torch.float32}
        assert all(torch.equal(plain[name], made[name]) for name in plain)
        assert not torch.equal(plain["head.weight"], before.head.weight)


def _with_batch_norm() -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.ModuleList([nn.BatchNorm1d(16)])[0], nn.Linear(16, 3),
    )  # fmt: skip
    model = shard(model, "bf16-master")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, policy="bf16-master")
    good, bad = small.batches(2)
    for _ in range(5):
        step(small.loss, good)
    before = model[1].running_mean.clone()
    step(small.loss, (bad[0] / 0, bad[1]))
    return [each.loss for each in step.history[:5]], torch.equal(before, model[1].running_mean)


def test_batch_norm_trains_under_fsdp_and_bf16_master(ranks: Ranks) -> None:
    for losses, put_back in ranks(_with_batch_norm):
        assert losses[-1] < losses[0]
        assert put_back


def _sharded_with(extra: Tensor) -> str:
    """What is said to a model with one more parameter, which is used."""
    model = small.network()
    model.extra = nn.Parameter(extra)
    try:
        model = shard(model, "bf16")
    except UsageError as error:
        return str(error)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy="bf16")
    step(lambda m, batch: small.loss(lambda x: m(x) * m.extra.sum(), batch), small.batches(1)[0])
    return "" if step.history[-1].grad_norm > 0 else "no gradient"


def test_parameters_that_cannot_be_split_are_named(ranks: Ranks) -> None:
    assert ranks(_sharded_with, torch.ones(1)) == ["", ""]  # all of it on the first rank
    for extra in (torch.tensor(1.0), torch.ones(0, 3), torch.ones(3, 2).t()):
        for said in ranks(_sharded_with, extra):
            assert said.startswith(f"shard: extra of shape {tuple(extra.shape)}: FSDP2 splits no")


class Nested(nn.Module):
    """Blocks in blocks, one used twice, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Module()
        inner.parts = nn.ModuleList([nn.Linear(8, 8)])
        inner.forward = lambda x: inner.parts[0](x)
        again = nn.Linear(8, 8)
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        self.blocks = nn.ModuleList([inner, again, again, first, second])
        self.levels = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.head(self.levels[0][0](inputs))


def _nested() -> list[float]:
    model = shard(Nested(), "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, policy="bf16")
    for _ in range(10):
        step(small.loss, small.batches(1)[0])
    return [each.loss for each in step.history]


def test_blocks_in_blocks_used_twice_and_tied(ranks: Ranks) -> None:
    losses = ranks(_nested)[0]
    assert losses[-1] < losses[0]
