"""The invariants of the step over two real processes (gloo): DDP and FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.distributed import replicate
from ampwise.errors import UsageError
from ampwise.policy import PRESETS, Resolution
from ampwise.policy.resolution import GUESSED
from ampwise.step import LossScale, race
from tests.distributed import small
from tests.distributed.ranks import Ranks
from tests.distributed.small import Spread

BOTH: tuple[Spread, Spread] = ("ddp", "fsdp")


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def same(values: list[Any]) -> Any:
    assert values[0] == values[1]
    return values[0]


# -- the same as one process -----------------------------------------------------------------------


def _trained(spread: Spread, precision: str, accumulate: int) -> tuple[Tensor, list[Any]]:
    model = small.network(spread)
    ranks = 1 if spread == "alone" else dist.get_world_size()
    step = TrainStep(
        model,
        adamw(model),
        policy=precision,
        accumulate=accumulate * (2 // ranks),
        max_grad_norm=0.5,
    )
    mine = small.me() if ranks > 1 else 0
    for batch in small.batches(100 * accumulate)[mine::ranks]:
        step(small.loss, batch)
    return small.parameters(model), [(e.loss, e.grad_norm, e.loss_scale) for e in step.history]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spread", BOTH)
def test_fifty_steps_on_two_ranks_equal_one_process(
    ranks: Ranks, spread: Spread, precision: str, accumulate: int
) -> None:
    # The same products are summed in another order: over ranks last instead of one after the other.
    # That is half an ULP of a gradient now and then; AdamW moves a weight by at most lr = 1e-2 a
    # step, so over 50 steps 2**-24 of that adds up to 3e-8; ten times as much is allowed. A weight
    # that differs by an ULP may then round to another 16-bit number, and its products differ by
    # 2**-8 (bfloat16) or 2**-11; ten steps of such an update's size are allowed.
    bound = {"fp32": 3e-7, "bf16": 10 * 1e-2 * 2**-8, "fp16": 10 * 1e-2 * 2**-11}[precision]
    alone, before = ranks(_trained, "alone", precision, accumulate)[0]
    for found, history in ranks(_trained, spread, precision, accumulate):
        assert len(history) == 50
        torch.testing.assert_close(found, alone, rtol=0, atol=bound)
        figures = torch.tensor(history), torch.tensor(before)
        torch.testing.assert_close(*figures, rtol=1e-5, atol=max(1e-6, bound))


# -- one decision ----------------------------------------------------------------------------------


def _bad_batch(spread: Spread, rank: int) -> dict[str, Any]:
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="fp16")
    data = small.batches(2)
    step(small.loss, data[0])
    before = small.parameters(model)
    inputs, labels = data[1]
    if small.me() == rank:
        inputs = inputs.clone()
        inputs[0, 0] = torch.inf
    step(small.loss, (inputs, labels))
    last = step.history[-1]
    return {
        "unchanged": torch.equal(small.parameters(model), before),
        "skipped": last.skipped,
        "scale": step.loss_scale.value,
        "steps": step.steps,
    }


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spread", BOTH)
def test_inf_on_one_rank_skips_all(ranks: Ranks, spread: Spread, rank: int) -> None:
    found = same(ranks(_bad_batch, spread, rank))
    assert found == {"unchanged": True, "skipped": True, "scale": 2.0**15, "steps": 2}


def _bad_shard(rank: int, fused: bool) -> tuple[bool, float, bool]:
    model = small.network("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    step = TrainStep(model, optimizer, policy="fp16")
    before = small.parameters(model)
    with step.autocast():
        loss = small.loss(model, small.batches(1)[0])
    step.backward(loss)
    if small.me() == rank:
        next(model.parameters()).grad._local_tensor[0, 0] = torch.inf
    step.update()
    unchanged = torch.equal(small.parameters(model), before)
    return step.history[-1].skipped, step.loss_scale.value, unchanged


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_inf_in_one_shard_skips_all(ranks: Ranks, rank: int, fused: bool) -> None:
    assert same(ranks(_bad_shard, rank, fused)) == (True, 2.0**15, True)


def _two_optimizers(spread: Spread, skip: Any) -> list[bool]:
    model = small.network(spread)
    inner = model.module if spread == "ddp" else model
    layers = (inner[0], inner[2])
    step = TrainStep(model, [adamw(each) for each in layers], policy="fp16", skip=skip)
    with step.autocast():
        loss = small.loss(model, small.batches(1)[0])
    step.backward(loss)
    if small.me() == 1:
        gradient = next(inner[2].parameters()).grad
        getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.nan
    before = [small.parameters(layer) for layer in layers]
    step.update()
    after = [small.parameters(layer) for layer in layers]
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    return [*moved, step.loss_scale.value == 2.0**15]


@pytest.mark.parametrize("spread", BOTH)
@pytest.mark.parametrize(("skip", "moved"), [("each", [True, False]), ("all", [False, False])])
def test_nan_in_one_of_two_optimizers_on_one_rank(
    ranks: Ranks, spread: Spread, skip: str, moved: list[bool]
) -> None:
    assert same(ranks(_two_optimizers, spread, skip)) == [*moved, True]


def _scale_trajectory(spread: Spread) -> list[tuple[float, bool]]:
    model = small.network(spread)
    scale = LossScale(growth_interval=3)
    step = TrainStep(model, adamw(model), policy="fp16", loss_scale=scale)
    for index, (inputs, labels) in enumerate(small.batches(20)):
        bad = index % 7 == 3 + small.me()  # now on one rank, now on the other
        step(small.loss, (inputs / 0 if bad else inputs, labels))
    return [(each.loss_scale, each.skipped) for each in step.history]


@pytest.mark.parametrize("spread", BOTH)
def test_scales_and_skips_are_the_same_on_all_ranks(ranks: Ranks, spread: Spread) -> None:
    history = same(ranks(_scale_trajectory, spread))
    assert sum(skipped for _, skipped in history) == 6


# -- norms -----------------------------------------------------------------------------------------


def _norm_of_mixed_meshes() -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(5, 1))
    reference = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(5, 1))
    reference.load_state_dict(model.state_dict())
    # Parts of it on each rank; a copy of all of it on each; and parts again, by two dimensions.
    for layer, shape in zip(model, ((2,), (2, 1), (1, 2)), strict=True):
        names = ("copies", "parts")[-len(shape) :]
        fully_shard(layer, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in model]
    step = TrainStep(model, optimizers, policy="fp32")
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    step(lambda m, batch: m(batch).square().mean(), inputs)
    reference(inputs).square().mean().backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in reference.parameters()])
    return step.history[-1].grad_norm, float(norm)


def test_norm_over_parts_that_are_spread_differently(ranks: Ranks) -> None:
    for found, expected in ranks(_norm_of_mixed_meshes):
        assert found == pytest.approx(expected, rel=1e-6)


def _huge_gradients() -> tuple[bool, float]:
    model = small.network("ddp")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="fp32")
    step(lambda m, batch: small.loss(m, batch) * 1e30, small.batches(1)[0])
    return step.history[-1].skipped, step.history[-1].grad_norm


def test_finite_gradients_whose_squares_overflow_are_no_inf(ranks: Ranks) -> None:
    skipped, norm = same(ranks(_huge_gradients))
    assert not skipped
    assert 1e28 < norm < 1e31


# -- windows ---------------------------------------------------------------------------------------


def _uneven(spread: Spread, how: str) -> tuple[Tensor, Tensor]:
    """Gradient of a window whose micro-batches differ in number and size, and that of all at once.

    Rank 0 has three micro-batches of 6, 6 and 4, rank 1 two of 2 and 5 and then one that counts
    nothing.
    """
    parts = [[small.batches(1, size)[0] for size in own] for own in ([6, 6, 4], [2, 5])]
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="fp32", accumulate=4)
    seen: list[Tensor] = []
    step.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(
            small.whole(each.grad).flatten().clone() for each in optimizer.param_groups[0]["params"]
        )
    )
    mine = parts[small.me()]
    for index in range(3):
        counts = index < len(mine)
        last = how == "last" and index == 2
        step(small.loss, mine[index if counts else 0], weight=None if counts else 0, last=last)
    step.flush()
    reference = small.network().double()
    inputs = torch.cat([batch[0] for own in parts for batch in own]).double()
    labels = torch.cat([batch[1] for own in parts for batch in own])
    F.cross_entropy(reference(inputs), labels).backward()
    exact = torch.cat([each.grad.flatten() for each in reference.parameters()])
    return torch.cat(seen).double(), exact


@pytest.mark.parametrize("how", ["flush", "last"])
@pytest.mark.parametrize("spread", BOTH)
def test_uneven_windows_give_the_gradient_of_all_samples(
    ranks: Ranks, spread: Spread, how: str
) -> None:
    for found, exact in ranks(_uneven, spread, how):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


def _in_step(spread: Spread, mine: int, other: int) -> tuple[list[bool], Tensor, float]:
    from ampwise.distributed import in_step

    count = (mine, other)[small.me()]
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="fp32", accumulate=2)
    seen: list[bool] = []
    for batch, counts in in_step(small.batches(8)[small.me() :: 2][:count]):
        step(small.loss, batch, weight=None if counts else 0)
        seen.append(counts)
    step.flush()
    return seen, small.parameters(model), step.steps


@pytest.mark.parametrize("spread", BOTH)
def test_ranks_with_different_numbers_of_batches(ranks: Ranks, spread: Spread) -> None:
    first, second = ranks(_in_step, spread, 4, 1)
    assert first[0] == [True] * 4
    assert second[0] == [True, False, False, False]
    assert first[2] == second[2] == 2
    assert torch.equal(first[1], second[1])
    # One process with the same batches, window by window.
    data = small.batches(8)
    model = small.network()
    alone = TrainStep(model, adamw(model), policy="fp32", accumulate=3)
    for index in (0, 1, 2):
        alone(small.loss, data[index])
    for index in (4, 6):
        alone(small.loss, data[index], last=index == 6)
    torch.testing.assert_close(first[1], small.parameters(model), rtol=0, atol=1e-6)


def _nothing_at_all() -> str:
    from ampwise.distributed import in_step

    try:
        for _ in in_step(small.batches(1) if small.me() else []):
            pass
    except UsageError as error:
        return str(error)
    return ""


def test_a_rank_without_any_batch_says_so(ranks: Ranks) -> None:
    assert "rank 0 has no batch" in same(ranks(_nothing_at_all))


def _token_weights(spread: Spread) -> tuple[float, float]:
    """Padded positions do not count, and the ranks have different numbers of the others."""
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="fp32", accumulate=2)
    reference = small.network().double()
    data = small.batches(4)
    kept = [4, 1, 6, 3]
    total = 0.0
    for (inputs, labels), count in zip(data, kept, strict=True):
        logits = reference(inputs[:count].double())
        summed = F.cross_entropy(logits, labels[:count], reduction="sum")
        summed.backward()
        total += float(summed.detach())
    norm = torch.nn.utils.get_total_norm([e.grad / sum(kept) for e in reference.parameters()])
    for index in (small.me(), 2 + small.me()):
        batch = (data[index][0][: kept[index]], data[index][1][: kept[index]])
        step(small.loss, batch, weight=torch.tensor(kept[index]))
    last = step.history[-1]
    return last.grad_norm / float(norm), last.loss / (total / sum(kept))


@pytest.mark.parametrize("spread", BOTH)
def test_windows_weigh_tokens_over_all_ranks(ranks: Ranks, spread: Spread) -> None:
    for ratio, loss_ratio in ranks(_token_weights, spread):
        assert ratio == pytest.approx(1, rel=1e-5)
        assert loss_ratio == pytest.approx(1, rel=1e-5)


def _weighing(weights: list[list[float]], as_tensor: bool) -> tuple[list[bool], bool]:
    """Train with given weights by rank; what was skipped, and whether all is finite."""
    model = small.network("ddp")
    scale = LossScale(init_scale=256.0)
    step = TrainStep(model, adamw(model), policy="fp16", max_grad_norm=1.0, loss_scale=scale)
    data = small.batches(2 * len(weights[0]))[small.me() :: 2]
    for batch, weight in zip(data, weights[small.me()], strict=True):
        step(small.loss, batch, weight=torch.tensor(weight) if as_tensor else weight)
    return [e.skipped for e in step.history], bool(small.parameters(model).isfinite().all())


@pytest.mark.parametrize("as_tensor", [True, False])
def test_weights_of_zero(ranks: Ranks, as_tensor: bool) -> None:
    if as_tensor:  # no rank can know that none of them counts anything
        nothing = [[4.0, 0.0, 4.0], [2.0, 0.0, 3.0]]
        assert same(ranks(_weighing, nothing, as_tensor)) == ([False, True, False], True)
    first = [[0.0, 4.0, 4.0], [2.0, 1.0, 3.0]]
    assert same(ranks(_weighing, first, as_tensor)) == ([False] * 3, True)


def test_shares_follow_the_weights(ranks: Ranks) -> None:
    """A first weight of 1 must not leave float16 gradients 60,000 times too large for ever."""
    weights = [[1.0, *[60000.0] * 9], [1.0, *[60000.0] * 9]]
    skipped, finite = same(ranks(_weighing, weights, True))
    assert finite
    assert skipped[2:] == [False] * 8


def _resumed(weights: list[float]) -> tuple[Tensor, Tensor]:
    def trained(part: list[float], data: list[Any], state: Any) -> tuple[Any, Any, Any, Tensor]:
        model = small.network("ddp")
        optimizer = adamw(model)
        step = TrainStep(model, optimizer, policy="fp16")
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            step.load_state_dict(state[2])
        for batch, weight in zip(data, part, strict=True):
            step(small.loss, batch, weight=torch.tensor(weight * (1 + small.me())))
        states = model.state_dict(), optimizer.state_dict(), step.state_dict()
        return *states, small.parameters(model)

    data = small.batches(len(weights))
    whole = trained(weights, data, None)
    middle = len(weights) // 2
    half = trained(weights[:middle], data[:middle], None)
    return whole[-1], trained(weights[middle:], data[middle:], half[:3])[-1]


def test_a_resumed_run_with_uneven_weights_is_the_same_bit_for_bit(ranks: Ranks) -> None:
    for whole, resumed in ranks(_resumed, [3.0, 7.0, 5.0, 14.0, 11.0, 4.0]):
        assert torch.equal(whole, resumed)


def _gradients_too_early() -> str:
    model = small.network("ddp")
    step = TrainStep(model, adamw(model), policy="fp32", accumulate=3)
    step(small.loss, small.batches(1)[0])
    try:
        step.gradients()
    except UsageError as error:
        return str(error)
    return ""


def test_gradients_in_the_middle_of_a_window_are_refused(ranks: Ranks) -> None:
    assert "in the middle of a window" in same(ranks(_gradients_too_early))


def _collectives(accumulate: int) -> tuple[int, int, int]:
    """Sums of gradient buckets, and all-reduces and broadcasts of ours, in three windows."""
    model = small.network("ddp")
    sums = itertools.count()

    def count(_state: Any, bucket: Any) -> Any:
        next(sums)
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    count.__annotations__ = {  # DDP checks it
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    model.register_comm_hook(None, count)
    step = TrainStep(model, adamw(model), policy="fp16", accumulate=accumulate)
    step(small.loss, small.batches(1)[0], last=True)  # DDP orders its buckets anew after the first
    seen = next(sums)
    ours = {"all_reduce": 0, "broadcast": 0}
    originals = {name: getattr(dist, name) for name in ours}

    def counting(name: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            ours[name] += not kwargs.get("async_op")
            return originals[name](*args, **kwargs)

        return wrapped

    for name in ours:
        setattr(dist, name, counting(name))
    try:
        for batch in small.batches(3 * accumulate):
            step(small.loss, batch)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return next(sums) - seen - 1, ours["all_reduce"], ours["broadcast"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_are_summed_once_a_window_and_all_else_in_one_more_sum(
    ranks: Ranks, accumulate: int
) -> None:
    assert same(ranks(_collectives, accumulate)) == (3, 3, 0)


def _of_a_static_graph(static: bool, precision: str) -> tuple[Tensor, list[float]]:
    """A short first window of several micro-batches of different sizes, and two full ones."""
    model = nn.parallel.DistributedDataParallel(small.network(), static_graph=static)
    step = TrainStep(model, adamw(model), policy=precision, accumulate=3, max_grad_norm=0.5)
    for index in range(8):
        (batch,) = small.batches(1, 2 + index + small.me())
        step(small.loss, batch, last=index == 1)
    return small.parameters(model), [each.grad_norm for each in step.history]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_windows_of_a_static_graph(ranks: Ranks, precision: str) -> None:
    expected, norms = ranks(_of_a_static_graph, False, precision)[0]
    for found, history in ranks(_of_a_static_graph, True, precision):
        assert len(history) == 3
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert history == pytest.approx(norms, rel=1e-6)


def _held_gradients() -> list[bool]:
    model = small.network("fsdp")
    step = TrainStep(model, adamw(model), policy="bf16", accumulate=3)
    present: list[bool] = []
    for batch in small.batches(2):
        step(small.loss, batch)
        present.append(any(each.grad is not None for each in model.parameters()))
    return present


def test_fsdp_keeps_gradients_to_itself_until_the_last_micro_batch(ranks: Ranks) -> None:
    assert same(ranks(_held_gradients)) == [False, False]


# -- ranks that are not like the others ------------------------------------------------------------


class _Branches(nn.Module):
    """Each rank uses a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.shared = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.branches[small.me()](inputs) + self.shared


def _a_branch_each() -> tuple[bool, list[bool]]:
    model = nn.parallel.DistributedDataParallel(_Branches(), find_unused_parameters=True)
    step = TrainStep(model, adamw(model), policy="fp16")
    for batch in small.batches(3):
        step(small.loss, batch)
    total = small.parameters(model)
    parts = [torch.zeros_like(total) for _ in range(2)]
    dist.all_gather(parts, total)
    return torch.equal(*parts), [each.skipped for each in step.history]


def test_ranks_that_use_different_parameters(ranks: Ranks) -> None:
    assert same(ranks(_a_branch_each)) == (True, [False, False, False])


def _an_empty_shard() -> tuple[list[int], list[bool]]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(8, 1)
    fully_shard(model)
    scale = LossScale(init_scale=1024.0)
    step = TrainStep(model, adamw(model), policy="fp16", max_grad_norm=1.0, loss_scale=scale)
    for inputs, _ in small.batches(3):
        step(lambda m, batch: m(batch).square().mean(), inputs)
    sizes = [each.to_local().numel() for each in model.parameters()]
    return sizes, [each.skipped for each in step.history]


def test_a_rank_without_any_gradient_takes_part(ranks: Ranks) -> None:
    first, second = ranks(_an_empty_shard)
    assert first == ([8, 1], [False] * 3)
    assert second == ([0, 0], [False] * 3)


# -- what the user sees ----------------------------------------------------------------------------


def _hooks(spread: Spread) -> tuple[float, float, float]:
    """Norm of the first weight's gradient: as a hook sees it, by `gradients`, and exact."""
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="fp16")
    seen: list[float] = []
    next(model.parameters()).register_post_accumulate_grad_hook(
        lambda parameter: seen.append(float(small.whole(parameter.grad).norm()))
    )
    batch = small.batches(1)[0]
    with step.autocast():
        loss = small.loss(model, batch)
    step.backward(loss)
    true = float(small.whole(step.gradients()["0.weight"]).norm())
    step.update()
    reference = small.network().double()
    F.cross_entropy(reference(batch[0].double()), batch[1]).backward()
    return seen[0], true, float(next(reference.parameters()).grad.norm())


@pytest.mark.parametrize("spread", BOTH)
def test_gradients_and_hooks_are_true(ranks: Ranks, spread: Spread) -> None:
    for seen, true, exact in ranks(_hooks, spread):
        assert true == pytest.approx(exact, rel=2e-3)
        assert seen == pytest.approx(exact, rel=2e-3)


def _asked_to_stop(spread: Spread) -> int:
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy="bf16")
    for batch in small.batches(6):
        if small.me() == 1 and step.steps == 2:
            step.ask_to_stop()
        step(small.loss, batch)
        if step.stopping:
            break
    return step.steps


@pytest.mark.parametrize("spread", BOTH)
def test_a_wish_to_stop_is_heard_by_all_at_the_same_step(ranks: Ranks, spread: Spread) -> None:
    assert same(ranks(_asked_to_stop, spread)) == 3


def _first_generation() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(8, 3), device_id=torch.device("cpu"))
    try:
        TrainStep(model, adamw(model), policy="bf16")
    except UsageError as error:
        return str(error)
    return ""


def test_fsdp_of_the_first_generation_is_refused(ranks: Ranks) -> None:
    assert "torch.distributed.fsdp.fully_shard(model)" in same(ranks(_first_generation))


def _own_models() -> bool:
    """A plain model in each process is that process's own business."""
    model = small.network(seed=small.me())
    step = TrainStep(model, adamw(model), policy="bf16")
    if small.me() == 0:  # a collective would hang
        step(small.loss, small.batches(1)[0])
    return True


def test_models_that_are_not_spread_are_left_alone(ranks: Ranks) -> None:
    assert ranks(_own_models) == [True, True]


# -- what a step that ends early leaves behind -----------------------------------------------------


def _after_an_open_window(spread: Spread, ends: str) -> tuple[Tensor, bool]:
    model = small.network(spread)
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, policy="fp32", accumulate=2, watch_every=0)
    data = small.batches(8)[small.me() :: 2]
    for batch in data[:3]:
        step(small.loss, batch)
    if ends == "forgotten":
        optimizer.zero_grad()
    else:
        getattr(step, ends)()
    for batch in data[3:]:  # a loop by hand
        small.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return small.parameters(model), True


@pytest.mark.parametrize("ends", ["discard", "reset", "close", "forgotten"])
@pytest.mark.parametrize("spread", BOTH)
def test_an_open_window_leaves_the_sum_over_ranks_on(
    ranks: Ranks, spread: Spread, ends: str
) -> None:
    first, second = ranks(_after_an_open_window, spread, ends)
    assert torch.equal(first[0], second[0])


# -- auto ------------------------------------------------------------------------------------------


def _raced(spread: Spread, out_on: int | None) -> tuple[str, str, Tensor]:
    guess = Resolution("auto", PRESETS["tf32"], "cpu", (GUESSED,), changed=False, guess=True)
    model = small.network(spread)
    step = TrainStep(model, adamw(model), policy=guess)
    rank, run = small.me(), race._Arm.turn_ms

    def turn_ms(arm: Any) -> float:
        run(arm)
        # bf16 is fast on the first rank alone, tf32 on both.
        return {"fp32": 4.0, "tf32": 2.0}.get(arm._rerun.policy.name, 5.0 if rank else 1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        lowered = torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        return small.loss(model, batch) * (float("nan") if lowered and rank == out_on else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race._Arm, "turn_ms", turn_ms)
        patch.setattr(race.cache, "recall", lambda *_: {})
        patch.setattr(race, "candidates", lambda _: ([PRESETS["tf32"], PRESETS["bf16"]], {}))
        step(loss, small.batches(2)[rank])
    step(small.loss, small.batches(4)[2 + rank])
    return step.policy.name, str(step.resolution), small.parameters(model)


@pytest.mark.parametrize(("out_on", "winner"), [(None, "tf32"), (1, "fp32")])
def test_all_ranks_decide_alike_what_is_fastest(
    ranks: Ranks, out_on: int | None, winner: str
) -> None:
    (name, words, parameters), other = ranks(_raced, "ddp", out_on)
    assert (name, words) == (winner, other[1])
    assert ("tf32 is out: its loss is not finite" in words) == (out_on is not None)
    assert "bf16 0.80x" in words  # of the slowest rank
    assert torch.equal(parameters, other[2])


def test_sharded_models_are_not_raced(ranks: Ranks) -> None:
    for name, words, _ in ranks(_raced, "fsdp", None):
        assert name == "tf32"
        assert "not raced: FSDP2 has set the dtype of its weights already" in words


# -- bf16-pure -------------------------------------------------------------------------------------


def _pure(policy: str) -> tuple[list[Tensor], list[float]]:
    rank = small.me()
    model = replicate(small.network("alone"), policy)
    torch.manual_seed(rank)  # random numbers of its own, as ranks have
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, policy=policy, max_grad_norm=0.5, watch_every=1)
    for index in range(12):
        step(small.loss, small.batches(8)[2 * (index % 4) + rank])
    state = [each for held in optimizer.state.values() for each in held.values()]
    return [*(each.detach() for each in model.parameters()), *state], [e.loss for e in step.history]


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16-pure:rounding=kahan"])
def test_ranks_round_what_they_hold_alike(ranks: Ranks, policy: str) -> None:
    first, second = ranks(_pure, policy)
    assert all(map(torch.equal, first[0], second[0]))
    assert {each.dtype for each in first[0] if each.dim()} == {torch.bfloat16}
    assert first[1] == second[1]


def _refused(spread: Spread) -> str:
    model = small.network(spread)
    with pytest.raises(UsageError) as caught:
        TrainStep(model, adamw(model), policy="bf16-pure")
    return str(caught.value)


def test_bfloat16_weights_are_refused_where_they_cannot_be(ranks: Ranks) -> None:
    for words in ranks(_refused, "ddp"):
        assert "expected ampwise.distributed.replicate(model, 'bf16-pure')" in words
    for words in ranks(_refused, "fsdp"):
        assert "expected one process or DDP" in words
