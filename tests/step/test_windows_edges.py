"""Windows at their edges: weights, states, what is left out of an update, buffers of every kind."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import LossScale, TrainStep, UsageError

from .helpers import SyncCounter, batches, classify, mlp, parameters
from .idioms import (
    KINDS,
    POLICIES,
    adamw,
    buffers,
    grads,
    nothing_left_open,  # noqa: F401 - a fixture
    one_line,
    poisoned,
    records,
    run,
    same,
    sgd,
    state_of,
    values,
)

ROUNDING = {"fp32": 1e-6, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-3, "bf16-master": 2e-2}
"""A few roundings of the format: another weight first is another factor in the backward."""


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


# -- micro-batches that count nothing ----------------------------------------------------------


Masked = tuple[Tensor, Tensor, Tensor]


def masked(*labelled: int) -> list[Masked]:
    """Micro-batches of 8, of which so many positions count."""
    return [
        (x, y, torch.arange(8) < count)
        for (x, y), count in zip(batches(len(labelled)), labelled, strict=True)
    ]


def token_mean(model: Any, batch: Masked) -> Tensor:
    """The mean over labelled positions: 0 / 0, NaN in loss and gradients, where there are none."""
    losses = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum()


def finite_mean(model: Any, batch: Masked) -> Tensor:
    """The same with a guard in the divisor, as careful scripts have it."""
    losses = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum().clamp(min=1)


WEIGHTS: dict[str, Callable[[Masked], Any]] = {
    "int": lambda batch: int(batch[2].sum()),
    "float": lambda batch: float(batch[2].sum()),
    "mask.sum()": lambda batch: batch[2].sum(),
    "float tensor": lambda batch: batch[2].float().sum(),
    "double tensor": lambda batch: batch[2].double().sum(),
}
ORDERS = {"first": (0, 5, 2), "middle": (5, 0, 2), "last": (5, 2, 0), "twice": (0, 0, 5, 2)}


def trained(
    data: list[Masked], loss_fn: Any, policy: str, how: str, weigh: Any, **settings: Any
) -> tuple[Tensor, TrainStep]:
    """One window over the data by SGD with lr 1: what it subtracted, and the step."""
    model = mlp()
    before = parameters(model)
    samples = {"samples": weigh} if how == "samples" else {}
    step = TrainStep(model, sgd(model, lr=1.0), policy=policy, accumulate=len(data), **samples)
    for batch in data:
        if how == "backward":
            with step.autocast():
                loss = loss_fn(model, batch)
            step.backward(loss, weight=weigh(batch))
        else:
            step(loss_fn, batch, **({} if how == "samples" else {"weight": weigh(batch)}))
    if how == "backward":
        step.update()
    return before - parameters(model), step


@pytest.mark.parametrize("loss_fn", [token_mean, finite_mean])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("how", ["weight", "samples", "backward"])
def test_a_micro_batch_of_weight_0_counts_nothing_and_loses_nothing(how, weight, order, loss_fn):
    data = masked(*ORDERS[order])
    counting = [batch for batch in data if batch[2].any()]
    seen, step = trained(data, loss_fn, "fp32", how, WEIGHTS[weight])
    expected, reference = trained(counting, loss_fn, "fp32", how, WEIGHTS["int"])
    assert step.steps == 1
    assert not step.history[0].skipped
    assert (seen - expected).norm() <= ROUNDING["fp32"] * expected.norm()
    assert step.history[0].loss == pytest.approx(reference.history[0].loss, rel=1e-6)
    assert step.history[0].grad_norm == pytest.approx(reference.history[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize("weight", ["int", "mask.sum()"])
def test_the_same_under_every_policy(weight, policy):
    data = masked(0, 5, 2)
    seen, step = trained(data, token_mean, policy, "samples", WEIGHTS[weight])
    expected, _ = trained(data[1:], token_mean, policy, "samples", WEIGHTS["int"])
    assert not step.history[0].skipped
    assert (seen - expected).norm() <= ROUNDING[policy] * expected.norm()


def test_weight_0_against_the_float64_gradient_of_all_that_counts():
    data = masked(0, 5, 0, 2)
    seen, _ = trained(data, token_mean, "fp32", "samples", WEIGHTS["mask.sum()"])
    reference = mlp().double()
    x, y, mask = (torch.cat([batch[index] for batch in data]) for index in range(3))
    F.cross_entropy(reference(x.double())[mask], y[mask]).backward()
    expected = torch.cat([each.grad.flatten() for each in reference.parameters()])
    assert (seen - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("counts", [0, 3])
def test_weights_on_the_device_cost_no_host_sync(counts, policy):
    """Whether a micro-batch counts is never asked; neither is whether its loss is NaN."""
    model, data = mlp(), masked(4, 4, 4, 4, counts, 4, 4, counts)
    step = TrainStep(
        model, sgd(model, "fused"), policy=policy, accumulate=2, samples=lambda b: b[2].sum()
    )
    run(step, token_mean, data[:4])
    with SyncCounter() as counter:
        run(step, token_mean, data[4:])
    assert counter.count == 0
    assert step.steps == 4


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_window_in_which_nothing_counts_trains_nothing(weight, policy, kind):
    """It is refused or skipped; parameters, state and the next window are as without it."""
    model, data = mlp(), masked(4, 4, 0, 0, 4, 4)
    optimizer = adamw(model, kind)
    step = TrainStep(model, optimizer, policy=policy, accumulate=2, samples=WEIGHTS[weight])
    run(step, token_mean, data[:2])
    before, state = values(model), state_of(optimizer)
    try:
        run(step, token_mean, data[2:4])
    except UsageError as refusal:
        one_line(refusal, "weight")
        step.discard()
    assert same(before, values(model))
    assert same(state["state"], optimizer.state_dict()["state"])
    run(step, token_mean, data[4:])
    assert not same(before, values(model))
    assert all(each.isfinite().all() for each in model.parameters())


# -- weights that are none ---------------------------------------------------------------------


BAD_WEIGHTS = [-1, -0.5, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("how", ["weight", "samples", "backward"])
@pytest.mark.parametrize("weight", BAD_WEIGHTS)
def test_negative_and_non_finite_weights_are_refused(weight, how, position):
    """And leave the step as before that micro-batch."""
    model, data, given = mlp(), batches(3), {}
    step = TrainStep(
        model, sgd(model), policy="fp16", accumulate=3,
        **({"samples": lambda _: given["weight"]} if how == "samples" else {}),
    )  # fmt: skip

    def go(batch: Any, value: Any) -> None:
        given["weight"] = value
        if how == "samples":
            step(classify, batch)
        elif how == "weight":
            step(classify, batch, weight=value)
        else:
            with step.autocast():
                loss = classify(model, batch)
            step.backward(loss, weight=value)

    for batch in data[:position]:
        go(batch, 8)
    collected = grads(model)
    with pytest.raises(UsageError) as refusal:
        go(data[position], weight)
    one_line(refusal.value)
    assert "weight" in str(refusal.value) or "samples" in str(refusal.value)
    assert step.position == position
    assert same(collected, grads(model))
    for batch in data[position:]:
        go(batch, 8)
    if how == "backward":
        step.update()
    assert step.steps == 1
    assert not step.history[0].skipped


@pytest.mark.parametrize("weight", BAD_WEIGHTS)
def test_bad_weights_in_a_tensor_never_train(weight, policy, kind):
    """Nobody waits for the device to see them: refused, or the window is skipped."""
    model, data = mlp(), batches(2)
    step = TrainStep(model, sgd(model, kind), policy=policy, accumulate=2)
    before = values(model)
    try:
        step(classify, data[0], weight=torch.tensor(8.0))
        step(classify, data[1], weight=torch.tensor(float(weight)))
    except UsageError as refusal:
        one_line(refusal, "weight")
    else:
        assert step.history[0].skipped
    assert same(before, values(model))


@pytest.mark.parametrize("weighted_first", [True, False])
def test_weighted_and_unweighted_losses_of_one_window_are_not_mixed(weighted_first):
    """One counts samples, the other 1 / accumulate: no sum of the two means anything."""
    model, data = mlp(), batches(2)
    step = TrainStep(model, sgd(model), policy="fp32", accumulate=2)
    weights = [8, None] if weighted_first else [None, 8]
    step.backward(classify(model, data[0]), weight=weights[0])
    collected = grads(model)
    with pytest.raises(UsageError) as refusal:
        step.backward(classify(model, data[1]), weight=weights[1])
    one_line(refusal.value, "weight")
    assert step.position == 1
    assert same(collected, grads(model))
    step.backward(classify(model, data[1]), weight=weights[0])
    step.update()
    assert step.steps == 1


# -- a state into a used step ------------------------------------------------------------------


def used(policy: str, **settings: Any) -> tuple[nn.Module, Any, TrainStep]:
    model = normed()
    optimizer = sgd(model, momentum=0.9)
    step = TrainStep(
        model, optimizer, policy=policy, accumulate=2,
        **{"loss_scale": LossScale(2.0**12)} if policy == "fp16" else {}, **settings,
    )  # fmt: skip
    return model, optimizer, step


def states(*things: Any) -> list[Any]:
    """Saved and read again, as `torch.load` reads by default."""
    file = io.BytesIO()
    torch.save([each.state_dict() for each in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(things: Any, saved: list[Any]) -> None:
    for each, state in zip(things, saved, strict=True):
        each.load_state_dict(state)


@pytest.mark.parametrize("open_window", [False, True])
def test_nothing_of_before_survives_a_loaded_state(policy, open_window):
    """No window, gradients, buffer copies or history; then it goes on as a fresh step does."""
    data = batches(16)
    bad = poisoned(data[9])
    source = used(policy)
    run(source[2], classify, data[:4])
    saved = states(*source)

    results = []
    for worn in (False, True):
        things = model, _, step = used(policy)
        if worn:
            run(step, classify, [*data[4:8], *([bad] if open_window else [])])
            if open_window:
                step.gradients()
        load(things, copy.deepcopy(saved))
        assert (step.position, step.steps) == (0, 2)
        assert grads(model) == [None] * len(grads(model))
        assert step.poll() == []
        assert [each.step for each in step.history if each.step > 2] == []
        run(step, classify, data[8:10])
        run(step, classify, [data[10], poisoned(data[11])])
        run(step, classify, data[12:14])
        results.append((values(model), buffers(model), records(step), step.state_dict()))
    numbers = [each.step for each in step.history]
    assert numbers[-3:] == [3, 4, 5]
    assert step.history[-1].skipped_total == 1
    assert same(results[0], results[1])


def test_a_loaded_state_forgets_the_buffers_of_the_open_window(policy):
    """The first window after it is skipped: its buffers are the loaded ones, not older copies."""
    data = batches(6)
    source = used(policy)
    run(source[2], classify, data[:4])
    saved = states(*source)
    things = model, _, step = used(policy)
    step(classify, data[4])
    load(things, saved)
    loaded = buffers(model)
    run(step, classify, [data[5], poisoned(data[4])])
    assert step.history[-1].skipped
    assert same(loaded, buffers(model))


def test_a_loaded_state_has_its_own_count_of_skipped_steps(policy):
    """Two skips before it do not add up with two after it to a limit of three."""
    model, (good,) = mlp(), batches(1)
    step = TrainStep(model, sgd(model), policy=policy, max_skips=3)
    fresh = copy.deepcopy(step.state_dict())
    run(step, classify, [poisoned(good)] * 2)
    step.load_state_dict(fresh)
    run(step, classify, [poisoned(good)] * 2)
    assert step.steps == 2


def test_a_state_of_a_closed_window_closes_an_open_one_between_two_updates():
    """Half an iteration of a GAN, dropped by a rollback."""
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy="fp16")
    fresh = copy.deepcopy(step.state_dict())
    x, y = batches(1)[0]
    step.backward(classify(models[0], (x, y)) * math.inf, optimizers=optimizers[:1])
    step.update(optimizers[:1], update_scale=False)
    step.load_state_dict(fresh)
    for model, optimizer in zip(models, optimizers, strict=True):
        step.backward(classify(model, (x, y)), optimizers=[optimizer])
    step.update()
    assert not step.history[-1].skipped
    assert step.loss_scale.value == 2.0**16


# -- a state in the middle of a window ---------------------------------------------------------


class Criterion(nn.Module):
    """Parameters of a loss, which no model has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.float() * self.scale + self.bias, y)


def with_criterion(policy: str, kind: str) -> tuple[Any, ...]:
    model, criterion = normed(), Criterion()
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters()}, {"params": criterion.parameters()}], lr=1e-2, **KINDS[kind]
    )
    settings = {"loss_scale": LossScale(2.0**12)} if policy == "fp16" else {}
    step = TrainStep(model, optimizer, policy=policy, accumulate=4, **settings)
    return model, criterion, optimizer, step


@pytest.mark.parametrize("worn", [False, True])
@pytest.mark.parametrize("bad", [None, 5, 6])
@pytest.mark.parametrize("stop", [4, 5, 6, 7])
def test_a_resume_in_mid_window_equals_the_uninterrupted_run(policy, stop, bad, worn):
    """BatchNorm's copies and gradients outside the model are in the state; also before a skip."""
    data = batches(12)
    if bad is not None:
        data[bad] = poisoned(data[bad])

    def go(things: Any, pieces: Any) -> None:
        criterion = things[1]
        run(things[3], lambda m, b: criterion(m(b[0]), b[1]), pieces)

    whole = with_criterion(policy, "fused")
    go(whole, data)
    cut = with_criterion(policy, "fused")
    go(cut, data[:stop])
    resumed = with_criterion(policy, "fused")
    if worn:
        go(resumed, batches(6, seed=9))
    load(resumed, states(*cut))
    assert resumed[3].position == stop % 4
    go(resumed, data[stop:])
    for mine, theirs in zip(whole[:2], resumed[:2], strict=True):
        assert same(values(mine), values(theirs))
        assert same(buffers(mine), buffers(theirs))
    assert same(whole[2].state_dict()["state"], resumed[2].state_dict()["state"])
    assert whole[3].loss_scale.state_dict() == resumed[3].loss_scale.state_dict()
    tail = records(resumed[3])[-(12 - stop + 3) // 4 :]
    assert tail == records(whole[3])[-len(tail) :]
    assert [each.skipped for each in whole[3].history] == [False, bad is not None, False]


def test_a_resume_with_weights_on_the_device(policy):
    data = masked(0, 5, 2, 3, 1, 4)

    def made() -> tuple[Any, ...]:
        model = mlp()
        optimizer = sgd(model)
        step = TrainStep(
            model, optimizer, policy=policy, accumulate=3, samples=lambda b: b[2].sum()
        )
        return model, optimizer, step

    whole, cut, resumed = made(), made(), made()
    run(whole[2], token_mean, data)
    run(cut[2], token_mean, data[:4])
    load(resumed, states(*cut))
    run(resumed[2], token_mean, data[4:])
    assert torch.equal(parameters(whole[0]), parameters(resumed[0]))
    assert parameters(whole[0]).isfinite().all()


def test_a_state_is_a_copy(policy):
    """What is trained after it was taken does not change it."""
    _, _, step = used(policy)
    data = batches(4)
    run(step, classify, data[:3])
    state = step.state_dict()
    kept = copy.deepcopy(state)
    step(classify, data[3])
    assert same(kept, state)


# -- gradients of an optimizer left out of an update -------------------------------------------


@pytest.mark.parametrize("change", ["backoff", "growth", "none"])
def test_gradients_left_out_of_an_update_survive_as_true_gradients(policy, kind, change):
    """The loss scale changes between their backward and their update."""
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each, kind, lr=1.0) for each in models]
    settings = LossScale(2.0**10, growth_interval=1 if change == "growth" else 2000)
    step = TrainStep(
        models, optimizers, policy=policy, **({"loss_scale": settings} if policy == "fp16" else {})
    )
    one, other = batches(2)
    before = parameters(models[1])

    def backward(index: int, batch: Any, factor: float = 1.0) -> None:
        with step.autocast():
            loss = classify(models[index], batch) * factor
        step.backward(loss, optimizers=[optimizers[index]])

    backward(1, one)
    backward(0, one, math.inf if change == "backoff" else 1.0)
    step.update(optimizers[:1])
    if policy == "fp16":
        assert (
            step.loss_scale.value == {"backoff": 2.0**9, "growth": 2.0**11, "none": 2.0**10}[change]
        )
    backward(1, other)
    seen = {name[2:]: g.clone() for name, g in step.gradients().items() if name.startswith("1.")}
    step.update(optimizers[1:])

    reference = mlp(1)
    (classify(reference, one) + classify(reference, other)).backward()
    for name, each in reference.named_parameters():
        assert (seen[name] - each.grad).norm() <= 0.05 * each.grad.norm()
    expected = torch.cat([each.grad.double().flatten() for each in reference.parameters()])
    assert (before - parameters(models[1]) - expected).norm() <= 0.05 * expected.norm()


# -- unscaling that overflows ------------------------------------------------------------------


class Factor(nn.Module):
    """A float32 parameter whose gradient is beyond float32, though each factor of it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.factor = nn.Parameter(torch.tensor([1e-3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().sum() + (self.factor.float() * 1e19).sum() * 4e19


OVERFLOWS = {
    **{f"{policy}, short window": (policy, 4, 1.0) for policy in POLICIES},
    **{f"{policy}, scale at the floor": (policy, 1, 2.0**-14) for policy in ("fp16", "bf16:scaling=on")},
}  # fmt: skip


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_of_unscaling_itself_is_seen_before_the_optimizer(kind, case, max_norm):
    """Finite when collected: a quarter of it, or 2**-14; inf when divided, unless clipped at once."""
    spelling, accumulate, scale = OVERFLOWS[case]
    scaled = spelling.startswith("fp16") or "scaling" in spelling
    model = Factor()
    optimizer = sgd(model, kind, momentum=0.9)
    step = TrainStep(
        model, optimizer, policy=spelling, accumulate=accumulate, max_grad_norm=max_norm,
        **({"loss_scale": LossScale(scale)} if scaled else {}),
    )  # fmt: skip
    before = values(model)
    step(lambda m, x: m(x), torch.ones(1, 1), last=True)
    (record,) = step.history
    moved = sum((old - new).square().sum() for old, new in zip(before, values(model), strict=True))
    if max_norm is None or record.skipped:
        assert record.skipped
        assert record.found_inf
        assert not math.isfinite(record.grad_norm)
        assert moved == 0
    else:  # a norm that float32 cannot hold may be off by a little
        assert moved.sqrt() <= 0.1 * max_norm * 1.2
    step(lambda m, x: m.layer(x).float().sum(), torch.ones(1, 1), last=True)
    assert all(each.isfinite().all() for each in model.parameters())


# -- copies of a step --------------------------------------------------------------------------


def by_pickle(step: TrainStep) -> TrainStep:
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("when", ["new", "used", "in a window"])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copied_step_trains_its_own_model_or_copying_is_refused(policy, copied, when):
    model, _, step = used(policy)
    data = batches(6)
    run(step, classify, data[: {"new": 0, "used": 2, "in a window": 3}[when]])
    before = values(model), buffers(model), step.state_dict()
    try:
        twin = copied(step)
    except UsageError as refusal:
        one_line(refusal, "step")
    else:
        assert twin.model is not model
        held = [each for group in twin.optimizer.param_groups for each in group["params"]]
        assert all(a is b for a, b in zip(held, twin.model.parameters(), strict=True))
        run(twin, classify, data[3:5])
        assert same(before, (values(model), buffers(model), step.state_dict()))
        run(step, classify, data[3:5])
        assert same(values(model), values(twin.model))
    run(step, classify, data[5:])
    assert all(each.isfinite().all() for each in model.parameters())


# -- buffers -----------------------------------------------------------------------------------


class Stat(nn.Module):
    """Adds to what it sees nothing but a buffer named `stat`, written in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stat", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.write(x.detach().float().mean(0))
        return x

    def write(self, mean: Tensor) -> None:
        self.stat.lerp_(mean, 0.1)


class Reassigned(Stat):
    def write(self, mean: Tensor) -> None:
        self.stat = self.stat * 0.9 + mean * 0.1


class Late(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def write(self, mean: Tensor) -> None:
        if not hasattr(self, "stat"):
            self.register_buffer("stat", mean.clone())
        self.stat.lerp_(mean, 0.1)


class NoneFirst(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", None)

    def write(self, mean: Tensor) -> None:
        self.stat = mean if self.stat is None else self.stat.lerp(mean, 0.1)


class Expanded(Stat):
    """A buffer whose elements share memory: nothing can be copied into it."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("base", torch.zeros(1))
        self.register_buffer("stat", self.base.expand(8))

    def write(self, mean: Tensor) -> None:
        self.base.add_(mean.mean())


class ExpandedReassigned(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", torch.zeros(1).expand(8))

    def write(self, mean: Tensor) -> None:
        self.stat = self.stat + mean


class Inference(Stat):
    """Made under inference mode: it has no version, and is not written in place outside."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        with torch.inference_mode():
            self.register_buffer("stat", torch.zeros(8))

    def write(self, mean: Tensor) -> None:
        with torch.inference_mode():
            self.stat.add_(mean)


class InferenceReassigned(Inference):
    def write(self, mean: Tensor) -> None:
        with torch.inference_mode():
            self.stat = self.stat + mean


class Growing(Stat):
    """A queue, or a cache, that gets longer."""

    def write(self, mean: Tensor) -> None:
        self.stat = torch.cat([self.stat, mean[:1]])


class Resized(Stat):
    def write(self, mean: Tensor) -> None:
        self.stat.resize_(len(self.stat) + 1).fill_(mean.mean())


class OtherDtype(Stat):
    def write(self, mean: Tensor) -> None:
        self.stat = self.stat.double() + mean


class View(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("all", torch.zeros(2, 8))
        self.register_buffer("stat", self.all[1])


class Shared(Stat):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("stat", self.stat)


class NotPersistent(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", torch.zeros(8), persistent=False)


class Counter(Stat):
    """Whole numbers and switches."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", torch.zeros((), dtype=torch.long))
        self.register_buffer("stat_set", torch.zeros((), dtype=torch.bool))

    def write(self, mean: Tensor) -> None:
        self.stat += 1
        self.stat_set.fill_(True)


class Complex(Stat):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", torch.zeros(8, dtype=torch.complex64))

    def write(self, mean: Tensor) -> None:
        self.stat.add_(mean)


class ByData(Stat):
    """Written through `.data`, which counts no version."""

    def write(self, mean: Tensor) -> None:
        self.stat.data.lerp_(mean, 0.1)


class Sometimes(Stat):
    """Written for the first time when something happens, as codebooks restart dead entries."""

    def write(self, mean: Tensor) -> None:
        if not mean.isfinite().all():
            self.stat.add_(1.0)


class Deleted(Stat):
    def write(self, mean: Tensor) -> None:
        del self.stat
        self.register_buffer("stat", mean)


class Swapped(Stat):
    """Two buffers change places, as double buffering does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stat_other", torch.ones(8))

    def write(self, mean: Tensor) -> None:
        self.stat, self.stat_other = self.stat_other.add_(mean), self.stat


class LowPrecision(Stat):
    """Kept in bfloat16, and written from inside autocast."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("stat", torch.zeros(8, dtype=torch.bfloat16))

    def write(self, mean: Tensor) -> None:
        self.stat.add_(mean.bfloat16())


STATS = {
    each.__name__: each
    for each in (
        Stat, Reassigned, Late, NoneFirst, Expanded, ExpandedReassigned, Inference,
        InferenceReassigned, Growing, Resized, OtherDtype, View, Shared, NotPersistent, Counter,
        Complex, ByData, Sometimes, Deleted, Swapped, LowPrecision,
    )
}  # fmt: skip


def every_buffer(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all buffers that are there, those of None left out."""
    found = {}
    for prefix, module in model.named_modules():
        for name, each in module._buffers.items():
            if each is not None:
                with torch.inference_mode(each.is_inference()):
                    found[f"{prefix}.{name}"] = each.clone()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("how", STATS)
def test_buffers_of_every_kind_are_put_back_or_named(how, before, accumulate, policy):
    """`before` windows, a skipped one, a good one: no crash, and no buffer changed unsaid."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), STATS[how](), nn.Linear(8, 4))
    data = batches(accumulate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = TrainStep(model, sgd(model), policy=policy, accumulate=accumulate)
        for _ in range(before):
            run(step, classify, data)
        kept, weights = every_buffer(model), values(model)
        run(step, classify, [*data[:-1], poisoned(data[-1])])
        now = every_buffer(model)
        words = " | ".join(str(each.message) for each in caught)
        assert step.history[-1].skipped
        assert same(weights, values(model))
        for name in kept.keys() | now.keys():
            back = name in kept and name in now and same(kept[name], now[name])
            assert back or name.rpartition(".")[2] in words, f"{name}: changed, and not named"
        run(step, classify, data)
    assert not step.history[-1].skipped
    assert not same(weights, values(model))


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_power_iteration_of_spectral_norm_is_put_back(norm, before, policy):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    step = TrainStep(model, sgd(model), policy=policy)
    run(step, classify, batches(before))
    kept, weights = buffers(model), values(model)
    step(classify, poisoned(batches(1)[0]))
    assert step.history[-1].skipped
    assert same(kept, buffers(model))
    assert same(weights, values(model))


# -- hooks that assign gradients, and updates about nothing ---------------------------------------


def test_hooks_that_assign_the_gradient_anew_count_it_once(policy):
    def norms(hook) -> list[float]:
        model = mlp()
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(hook)
        step = TrainStep(model, sgd(model, "plain"), policy=policy, accumulate=2)
        run(step, classify, batches(4))
        return [record.grad_norm for record in step.history]

    def anew(parameter: Tensor) -> None:
        parameter.grad = parameter.grad.clamp(-1e9, 1e9)

    def in_place(parameter: Tensor) -> None:
        parameter.grad.clamp_(-1e9, 1e9)

    assert norms(anew) == pytest.approx(norms(in_place), rel=1e-6)


def test_a_gradient_that_a_hook_has_used_up_stays_gone(policy):
    model = nn.Linear(4, 1)
    calls = []

    def use_up(parameter: Tensor) -> None:
        calls.append(None)
        if len(calls) == 2:
            parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(use_up)
    step = TrainStep(model, sgd(model, "plain"), policy=policy, accumulate=2)
    before = model.weight.detach().clone()
    for _ in range(2):
        step(lambda m, b: m(b).float().square().mean(), torch.randn(8, 4))
    assert len(calls) == 2
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("weights", "factor", "scale", "skipped"),
    [
        ((0, 8), 1.0, 1024.0, False),
        ((8, 0), 1.0, 1024.0, False),
        ((8, 8), 1e30, 512.0, True),
        ((8, 0), 1e30, 512.0, True),
        ((0, 0), 1.0, 1024.0, True),
    ],
)
def test_an_update_about_nothing_has_no_say_in_the_iteration(weights, factor, scale, skipped):
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [sgd(each, "plain") for each in models]
    step = TrainStep(models, optimizers, policy="fp16", loss_scale=LossScale(1024.0))
    x = torch.randn(8, 4)
    for index, (model, weight) in enumerate(zip(models, weights, strict=True)):
        with step.autocast():
            loss = model(x).float().square().mean() * (factor if index == 0 else 1.0)
            loss = loss * (factor if index == 0 else 1.0)
        step.backward(loss, optimizers=[optimizers[index]], weight=weight)
        step.update([optimizers[index]], update_scale=index == 1)
    assert step.loss_scale.value == scale
    assert step.history[-1].skipped == skipped


def test_a_state_with_gradients_of_other_shapes_changes_nothing(policy):
    narrow, wide = nn.Linear(8, 4), nn.Linear(8, 6)
    step = TrainStep(narrow, sgd(narrow, "plain"), policy=policy, accumulate=2)
    step(classify, batches(1)[0])
    other = TrainStep(wide, sgd(wide, "plain"), policy=policy, accumulate=2)
    with pytest.raises(UsageError, match=r"weight \(\(4, 8\), expected \(6, 8\)\)"):
        other.load_state_dict(step.state_dict())
    assert other.position == 0
