"""Invariant 11: what belongs to whom is read when it is needed; a misuse is named when it is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel

import ampwise
from ampwise import LossScale, TrainStep, UsageError

from .helpers import batches, classify, mlp, parameters
from .idioms import (
    KINDS,
    ByHand,
    adamw,
    assert_follows,
    buffers,
    nothing_left_open,  # noqa: F401 - a fixture
    one_line,
    poisoned,
    run,
    said,
    same,
    sgd,
    values,
)


class Net(nn.Module):
    """A body and a head that tests replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def by_parts(step: Any, optimizer: Any) -> Callable[..., None]:
    """A step by its parts, which name the optimizer."""

    def one(loss_fn: Callable[..., Tensor], batch: Any) -> None:
        with step.autocast():
            loss = loss_fn(step.model, batch)
        step.backward(loss, optimizers=[optimizer])
        step.update([optimizer])

    return one


# -- parameters that come, go and wake up ------------------------------------------------------


@pytest.mark.parametrize("parts", [False, True])
def test_parameters_added_to_a_group_later_are_trained(policy, kind, parts):
    """`add_param_group` after two steps, by the whole step or by ``backward(optimizers=...)``."""
    trained = []
    for of in (TrainStep, ByHand):
        model, data = Net(), batches(5)
        start = parameters(model)
        optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1, **KINDS[kind])
        loop = of(model, optimizer, policy=policy)
        go = by_parts(loop, optimizer) if parts and of is TrainStep else loop
        run(go, classify, data[:2])
        model.head.zero_grad()  # by hand it has collected, and the optimizer does not know it
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.05})
        run(go, classify, data[2:])
        trained.append(model)
    assert_follows(*trained, start, policy)


@pytest.mark.parametrize("parts", [False, True])
def test_unfrozen_parameters_are_trained(policy, kind, parts):
    """They were in the optimizer all along, without a gradient."""
    trained = []
    for of in (TrainStep, ByHand):
        model, data = Net(), batches(5)
        model.body.requires_grad_(False)
        start = parameters(model)
        optimizer = sgd(model, kind)
        loop = of(model, optimizer, policy=policy)
        go = by_parts(loop, optimizer) if parts and of is TrainStep else loop
        frozen = values(model.body)
        run(go, classify, data[:2])
        assert same(frozen, values(model.body))
        model.body.requires_grad_(True)
        run(go, classify, data[2:])
        assert not same(frozen, values(model.body))
        trained.append(model)
    assert_follows(*trained, start, policy)


def test_parameters_frozen_later_stay(policy, kind):
    trained = []
    for of in (TrainStep, ByHand):
        model, data = Net(), batches(5)
        start = parameters(model)
        loop = of(model, sgd(model, kind), policy=policy)
        run(loop, classify, data[:2])
        model.body.requires_grad_(False)
        frozen = values(model.body)
        run(loop, classify, data[2:])
        assert same(frozen, values(model.body))
        trained.append(model)
    assert_follows(*trained, start, policy)


@pytest.mark.parametrize("how", ["add_param_group", "unfreeze", "swap"])
def test_hooks_of_new_parameters_see_true_gradients(policy, how):
    """A loss scale of 65536 must not show."""
    model, (batch,), seen = Net(), batches(1), {}
    if how == "unfreeze":
        model.head.requires_grad_(False)
    held = model.parameters() if how == "unfreeze" else model.body.parameters()
    optimizer = torch.optim.SGD(held, lr=0.0)
    step = TrainStep(model, optimizer, policy=policy)
    step(classify, batch)
    model.head.zero_grad()
    if how == "unfreeze":
        model.head.requires_grad_(True)
    else:
        if how == "swap":
            model.head = copy.deepcopy(model.head)
        optimizer.add_param_group({"params": model.head.parameters()})
    weight = model.head.weight
    weight.register_hook(lambda g: seen.update(tensor=g.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.update(post=p.grad.clone()))
    step.backward(classify_under(step, batch), optimizers=[optimizer])
    seen["gradients"] = step.gradients()["head.weight"].clone()
    step.update()
    reference = Net()
    classify(reference, batch).backward()
    expected = reference.head.weight.grad
    assert set(seen) == {"tensor", "post", "gradients"}
    for name, gradient in seen.items():
        assert (gradient - expected).norm() <= 0.05 * expected.norm(), name
    assert step.history[-1].grad_norm == pytest.approx(
        torch.cat([p.grad.flatten() for p in reference.parameters()]).norm().item(), rel=0.05
    )


def classify_under(step: Any, batch: Any) -> Tensor:
    with step.autocast():
        return classify(step.model, batch)


def test_a_swapped_head_is_trained_and_the_old_one_left_alone(policy, kind):
    trained = []
    for of in (TrainStep, ByHand):
        model, data = Net(), batches(6)
        optimizer = sgd(model, kind)
        loop = of(model, optimizer, policy=policy)
        run(loop, classify, data[:3])
        old, before = model.head, values(model.head)
        torch.manual_seed(5)
        model.head = nn.Linear(16, 4)
        start = parameters(model)
        optimizer.add_param_group({"params": model.head.parameters()})
        run(loop, classify, data[3:])
        assert same(before, values(old))
        trained.append(model)
    assert_follows(*trained, start, policy)


def test_a_swapped_in_module_has_its_buffers_put_back_on_a_skip(policy):
    """A head with BatchNorm that the step has not seen when it was made."""
    model, (good,) = Net(), batches(1)
    optimizer = sgd(model)
    step = TrainStep(model, optimizer, policy=policy)
    step(classify, good)
    model.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer.add_param_group({"params": model.head.parameters()})
    step(classify, good)
    before, stats = values(model), buffers(model)
    step(classify, poisoned(good))
    assert step.history[-1].skipped
    assert same(before, values(model))
    assert same(stats, buffers(model))


def test_a_state_in_mid_window_names_a_swapped_head(policy):
    """Saved with the new head's gradients, resumed in a model of the same shape."""

    def made() -> tuple[Net, Any, TrainStep]:
        model = Net()
        optimizer = sgd(model)
        step = TrainStep(model, optimizer, policy=policy, accumulate=2)
        torch.manual_seed(5)
        model.head = nn.Linear(16, 4)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        return model, optimizer, step

    data = batches(2)
    whole, _, step = made()
    run(step, classify, data)
    cut, _, first = made()
    first(classify, data[0])
    state = copy.deepcopy(first.state_dict())
    resumed, _, second = made()
    resumed.load_state_dict(cut.state_dict())
    second.load_state_dict(state)
    second(classify, data[1])
    assert torch.equal(parameters(whole), parameters(resumed))


def test_replaced_parameters_of_a_group_are_read(policy, kind):
    """``optimizer.param_groups[0]["params"] = ...`` after surgery on the model."""
    trained = []
    for of in (TrainStep, ByHand):
        model, data = Net(), batches(5)
        optimizer = sgd(model, kind)
        loop = of(model, optimizer, policy=policy)
        run(loop, classify, data[:2])
        wider = nn.Linear(8, 16)
        wider.load_state_dict({n: t * 0.5 for n, t in model.body.state_dict().items()})
        model.body = wider
        start = parameters(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        run(loop, classify, data[2:])
        trained.append(model)
    assert_follows(*trained, start, policy)


def test_settings_of_groups_are_read(policy, kind):
    """Learning rate and weight decay, set by hand between steps."""
    trained = []
    for of in (TrainStep, ByHand):
        model = Net()
        start = parameters(model)
        optimizer = adamw(model, kind)
        loop = of(model, optimizer, policy=policy)
        for index, batch in enumerate(batches(4)):
            optimizer.param_groups[0].update(lr=0.01 * index, weight_decay=0.1 * index)
            loop(classify, batch)
        trained.append(model)
    if policy == "bf16-master":  # Adam's first updates are signs: small gradients weigh as much
        assert_follows(*trained, start, policy, bound=0.2)
    else:
        assert_follows(*trained, start, policy)


def test_an_optimizer_that_replaces_another_is_used_or_refused(policy):
    """``step.optimizer = new``: never goes on with the old one in silence."""
    model, (batch,) = Net(), batches(1)
    old = sgd(model)
    step = TrainStep(model, old, policy=policy)
    step(classify, batch)
    before = parameters(model)
    try:
        step.optimizer = sgd(model, lr=0.0)
        step(classify, batch)
    except (UsageError, AttributeError) as refusal:
        one_line(refusal, "optimizer")
    else:
        assert torch.equal(before, parameters(model)), "the old optimizer is still at work"


def test_the_optimizer_replaced_in_the_list_given_is_used_or_refused():
    """A list is the user's, too: what is in it later must not be half known."""
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy="fp16")
    optimizers[1] = sgd(models[1], lr=0.0)
    before = parameters(models[1])
    with step.autocast():
        loss = classify(models[1], batches(1)[0])
    try:
        step.backward(loss, optimizers=[optimizers[1]])
        step.update([optimizers[1]])
    except UsageError as refusal:
        one_line(refusal, "optimizer")
    assert torch.equal(before, parameters(models[1]))


def test_a_frozen_16_bit_base_with_float32_adapters_trains(kind):
    """QLoRA's shape: frozen parameters have no gradient, and may be stored in what they like."""
    for policy, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        trained = []
        for of in (TrainStep, ByHand):
            model = Net()
            model.body.to(dtype).requires_grad_(False)
            base, start = values(model.body), parameters(model)
            optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, **KINDS[kind])
            if of is TrainStep:
                made = []
                assert not said(lambda: made.append(TrainStep(model, optimizer, policy=policy)))
                loop: Any = made[0]
                assert not said(lambda: run(loop, classify, batches(3)))
            else:
                loop = ByHand(model, optimizer, policy)
                run(loop, classify, batches(3))
            assert same(base, values(model.body))
            trained.append(model)
        assert_follows(*trained, start, policy)


# -- misuse that is named ----------------------------------------------------------------------


def test_an_optimizer_without_a_parameter_of_the_model_is_named(policy):
    model, other = mlp(), mlp(1)
    words = said(lambda: TrainStep(model, sgd(other), policy=policy))
    assert "optimizer" in words
    assert "SGD" in words


def test_one_of_two_optimizers_without_a_parameter_of_the_models_is_named(policy):
    one, other, foreign = mlp(0), mlp(1), mlp(2)
    words = said(lambda: TrainStep([one, other], [sgd(one), adamw(foreign)], policy=policy))
    assert "AdamW" in words


def test_an_optimizer_of_the_models_copy_is_named(policy):
    """The usual way to get there: the model is moved or copied after the optimizer was made."""
    model = mlp()
    optimizer = sgd(model)
    assert "optimizer" in said(lambda: TrainStep(copy.deepcopy(model), optimizer, policy=policy))


def test_no_complaint_where_nothing_is_wrong(policy):
    """A criterion's parameters beside the model's; two models; a part of the model."""
    model, criterion = mlp(), nn.Linear(4, 4)
    both = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    assert not said(lambda: TrainStep(model, both, policy=policy))
    assert not said(lambda: TrainStep(model, sgd(model[2]), policy=policy))
    models = [mlp(0), mlp(1)]
    assert not said(lambda: TrainStep(models, sgd(nn.ModuleList(models)), policy=policy))
    made = sgd(model)
    assert not said(lambda: TrainStep(model, made, policy=policy, scheduler=StepLR(made, 1)))


def test_a_scheduler_of_another_optimizer_is_named(policy):
    model, other = mlp(), mlp(1)
    words = said(
        lambda: TrainStep(model, sgd(model), policy=policy, scheduler=StepLR(sgd(other), 1))
    )
    assert "scheduler" in words
    assert "StepLR" in words


def test_an_optimizer_listed_twice_is_refused(policy):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(UsageError) as refusal:
        TrainStep(model, [optimizer, optimizer], policy=policy)
    one_line(refusal.value, "optimizer", "twice")


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_an_empty_list_is_refused(what):
    model = mlp()
    given = {"model": model, "optimizer": sgd(model)} | {what: []}
    with pytest.raises(UsageError) as refusal:
        TrainStep(**given, policy="fp32")
    one_line(refusal.value, what)


def test_a_step_inside_a_step_is_refused(policy):
    """Called in its own loss_fn it would begin a window inside a window."""
    model, (batch,) = mlp(), batches(1)
    step = TrainStep(model, sgd(model), policy=policy)
    before = values(model)
    with pytest.raises(UsageError) as refusal:
        step(lambda m, b: step(classify, b).requires_grad_() + classify(m, b), batch)
    one_line(refusal.value)
    assert same(before, values(model))
    assert (step.position, step.steps) == (0, 0)
    step(classify, batch)
    assert not same(before, values(model))


def test_another_step_on_the_same_model_inside_a_step_is_named(policy):
    model, (batch,) = mlp(), batches(1)
    optimizer = sgd(model)
    outer, inner = (TrainStep(model, optimizer, policy=policy) for _ in range(2))
    words = said(lambda: outer(lambda m, b: inner(classify, b) * 0 + classify(m, b), batch))
    assert "step" in words.lower()


def test_a_step_given_as_the_model_is_refused():
    model = mlp()
    step = TrainStep(model, sgd(model), policy="fp32")
    with pytest.raises(UsageError) as refusal:
        TrainStep(step, sgd(model), policy="fp32")
    one_line(refusal.value, "model", "TrainStep")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_under_fp16_are_named_and_never_become_nan(dtype, when, kind):
    """`model.half()`: torch's scaler refuses to unscale its gradients."""
    model, data = mlp(), batches(3)
    if when == "before":
        model.to(dtype)
    optimizer = sgd(model, kind)

    def train() -> None:
        step = TrainStep(model, optimizer, policy="fp16")
        if when == "after":
            model.to(dtype)
        run(step, classify, data)

    words = said(train)
    assert "float16" in words
    assert str(dtype).removeprefix("torch.") in words
    assert "0.weight" in words or "parameter" in words
    assert all(each.isfinite().all() for each in model.parameters())


class OwnAutocast(nn.Module):
    """Somebody else's autocast inside the model, as trainers wrap forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x).float()


@pytest.mark.parametrize("asked", ["fp32", "tf32"])
def test_float32_over_a_model_that_runs_in_bf16_is_named(asked):
    model = OwnAutocast()
    words = said(lambda: TrainStep(model, sgd(model), policy=asked)(classify, batches(1)[0]))
    assert "bfloat16" in words
    assert asked in words


def test_fp32_strict_over_a_model_that_runs_in_bf16_fails():
    model = OwnAutocast()
    step = TrainStep(model, sgd(model), policy="fp32", strict=True)
    with pytest.raises(ampwise.InactivePolicyError, match="bfloat16"):
        step(classify, batches(1)[0])


# -- schedulers --------------------------------------------------------------------------------


def test_reduce_lr_on_plateau_is_driven_by_the_loss_or_refused():
    model = mlp()
    optimizer = sgd(model, lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    try:
        step = TrainStep(model, optimizer, policy="fp32", scheduler=scheduler)
    except UsageError as refusal:
        one_line(refusal, "scheduler", "ReduceLROnPlateau")
        return
    for batch in batches(6):
        step(lambda m, b: classify(m, b) * 0 + 1.0, batch)
    assert optimizer.param_groups[0]["lr"] <= 0.05


class NeedsEpoch(LRScheduler):
    """A scheduler whose step cannot be called without an argument."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _initial_step(self) -> None:
        self.last_epoch = 0

    def step(self, epoch: int) -> None:  # type: ignore[override]
        self.last_epoch = epoch


class ByUpdates:
    """timm's manner: ``step(epoch)``, ``step_update(num_updates)``, and not an LRScheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_in_epochs: bool = True) -> None:
        self.optimizer, self.t_in_epochs, self.seen = optimizer, t_in_epochs, []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.seen.append(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.seen.append(num_updates)


@pytest.mark.parametrize("make", [NeedsEpoch, ByUpdates])
def test_a_scheduler_that_needs_arguments_is_refused_when_the_step_is_made(make):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(UsageError) as refusal:
        TrainStep(model, optimizer, policy="fp32", scheduler=make(optimizer))
    one_line(refusal.value, "scheduler", make.__name__)


def test_a_scheduler_that_counts_updates_is_given_their_number(policy):
    """Skipped steps are no updates; the count goes on from a checkpoint."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = ByUpdates(optimizer, t_in_epochs=False)
    step = TrainStep(model, optimizer, policy=policy, scheduler=scheduler)

    def loss_fn(m, batch, bad=False):
        return classify(m, batch) * (float("nan") if bad else 1.0)

    for number, batch in enumerate(batches(5)):
        step(partial(loss_fn, bad=number == 2), batch)
    assert scheduler.seen == [1, 2, 3, 4]
    again = TrainStep(model, optimizer, policy=policy, scheduler=scheduler)
    again.load_state_dict(step.state_dict())
    again(classify, batches(1)[0])
    assert scheduler.seen == [1, 2, 3, 4, 5]


def test_schedulers_of_transformers_go_as_by_hand(policy):
    transformers = pytest.importorskip("transformers")
    model = mlp()
    optimizer, reference = sgd(model), sgd(mlp())
    make = transformers.get_cosine_schedule_with_warmup
    step = TrainStep(model, optimizer, policy=policy, scheduler=make(optimizer, 2, 6))
    scheduler, rates = make(reference, 2, 6), []
    for batch in batches(6):
        rates.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
        step(classify, batch)
    assert [record.lr for record in step.history] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_comes_with_the_loss_is_given_back_detached(policy, accumulate):
    model, alone = mlp(), mlp()
    step = TrainStep(model, sgd(model), policy=policy, accumulate=accumulate)
    plain = TrainStep(alone, sgd(alone), policy=policy, accumulate=accumulate)

    def with_logits(m, batch):
        logits = m(batch[0])
        return F.cross_entropy(logits, batch[1]), {"logits": logits, "name": "mlp"}, 7

    for batch in batches(4):
        loss, more, seven = step(with_logits, batch)
        assert torch.equal(loss, plain(classify, batch))
        assert (loss.requires_grad, more["logits"].requires_grad) == (False, False)
        assert (more["logits"].shape, more["name"], seven) == ((8, 4), "mlp", 7)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tuple_that_does_not_begin_with_the_loss_is_refused():
    model = mlp()
    step = TrainStep(model, sgd(model), policy="fp32")
    with pytest.raises(UsageError) as refusal:
        step(lambda m, b: ("loss", classify(m, b)), batches(1)[0])
    one_line(refusal.value, "loss", "got str", "a tuple that begins with it")


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda epoch: 0.9),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 2), StepLR(o, 1)], [2]),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("which", SCHEDULERS)
def test_schedulers_of_torch_go_as_by_hand(which, policy):
    model, hand = mlp(), mlp()
    optimizer, reference = sgd(model), sgd(hand)
    step = TrainStep(model, optimizer, policy=policy, scheduler=SCHEDULERS[which](optimizer))
    scheduler, rates, seen = SCHEDULERS[which](reference), [], []
    for batch in batches(6):
        rates.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
        step(classify, batch)
    seen = [record.lr for record in step.history]
    assert seen == pytest.approx(rates, rel=1e-12)


# -- arguments ---------------------------------------------------------------------------------


WRONG: dict[str, tuple[str, Any]] = {
    "model=None": ("model", None),
    "model is a class": ("model", nn.Linear),
    "model is a function": ("model", lambda x: x),
    "model is parameters": ("model", lambda: mlp().parameters()),
    "a None among models": ("model", [None]),
    "optimizer=None": ("optimizer", None),
    "optimizer is a class": ("optimizer", torch.optim.SGD),
    "optimizer is a dict": ("optimizer", {"lr": 0.1}),
    "optimizer is a name": ("optimizer", "sgd"),
    "a None among optimizers": ("optimizer", [None]),
    "policy=None": ("policy", None),
    "policy is a dtype": ("policy", torch.bfloat16),
    "policy is a class": ("policy", ampwise.Policy),
    "policy is a switch": ("policy", True),
    "accumulate=2.5": ("accumulate", 2.5),
    "accumulate=None": ("accumulate", None),
    "accumulate is text": ("accumulate", "4"),
    "accumulate=nan": ("accumulate", float("nan")),
    "accumulate=-1": ("accumulate", -1),
    "max_grad_norm is text": ("max_grad_norm", "1.0"),
    "max_grad_norm=0": ("max_grad_norm", 0),
    "max_skips=2.5": ("max_skips", 2.5),
    "max_skips=None": ("max_skips", None),
    "watch_every=0.5": ("watch_every", 0.5),
    "scheduler is a class": ("scheduler", StepLR),
    "scheduler is a name": ("scheduler", "cosine"),
    "ema is a class": ("ema", torch.optim.swa_utils.AveragedModel),
    "ema is a rate": ("ema", 0.999),
    "samples is a number": ("samples", 8),
    "loss_scale is a number": ("loss_scale", 65536.0),
    "loss_scale is a class": ("loss_scale", LossScale),
    "loss_scale is torch's": ("loss_scale", torch.amp.GradScaler("cpu")),
    "skip=None": ("skip", None),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_in_one_line(wrong):
    name, value = WRONG[wrong]
    model = mlp()
    if wrong == "model is parameters":
        value = model.parameters()
    given: dict[str, Any] = {"model": model, "optimizer": sgd(model), "policy": "fp16"}
    with pytest.raises(UsageError) as refusal:
        TrainStep(**given | {name: value})
    if name != "policy":
        one_line(refusal.value, name)
    else:
        assert "\n" not in str(refusal.value)
        assert "policy" in str(refusal.value) or "precision" in str(refusal.value)


def test_a_refused_constructor_leaves_model_and_optimizer_as_they_were(policy):
    """Also where what is wrong is found after the model was looked at."""
    model = mlp()
    optimizer = sgd(model)
    before = [(id(each), each.dtype) for each in model.parameters()]
    for wrong in ({"scheduler": StepLR}, {"accumulate": 2.5}, {"ema": 0.9}):
        with pytest.raises(UsageError):
            TrainStep(model, optimizer, policy=policy, **wrong)
    assert [(id(each), each.dtype) for each in model.parameters()] == before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [at for at, _ in before]


def test_swapped_arguments_of_a_call_are_refused():
    model, (batch,) = mlp(), batches(1)
    step = TrainStep(model, sgd(model), policy="fp32")
    for wrong in ((batch, classify), (None, batch), (classify(model, batch), batch)):
        with pytest.raises(UsageError) as refusal:
            step(*wrong)
        one_line(refusal.value, "loss_fn")
    assert step.position == 0


@pytest.mark.parametrize("call", ["backward", "update"])
def test_optimizers_that_are_not_the_steps_are_refused(call):
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy="fp16")
    for wrong in ([sgd(models[0])], [None], [torch.optim.SGD], [0]):
        loss = classify(models[0], batches(1)[0])
        with pytest.raises(UsageError) as refusal:
            if call == "backward":
                step.backward(loss, optimizers=wrong)
            else:
                step.backward(loss)
                step.update(wrong)
        one_line(refusal.value, "optimizer")
        if call == "update":
            step.update()


# -- what grows ----------------------------------------------------------------------------------


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.blocks = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_first_child_of_an_empty_container_is_seen(policy):
    torch.manual_seed(0)
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, policy=policy)
    x = torch.randn(8, 8)
    loss = lambda m, b: m(b).float().square().mean()  # noqa: E731
    step(loss, x)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.blocks.append(block)
    optimizer.add_param_group({"params": block.parameters()})
    step(loss, x)
    before = block[1].running_mean.clone()
    bad = x.clone()
    bad[0, 0] = math.inf
    step(loss, bad)
    assert step.history[-1].skipped
    assert torch.equal(block[1].running_mean, before)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each -= 0.1 * each.grad.sign()


def test_an_optimizer_without_a_learning_rate_trains(policy):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    step = TrainStep(model, WithoutRate(model.parameters()), policy=policy)
    before = model.weight.detach().clone()
    for _ in range(8):  # until the loss scale has settled
        step(lambda m, b: m(b).float().square().mean(), torch.randn(8, 4))
    assert math.isnan(step.history[0].lr)
    assert not torch.equal(before, model.weight)


# -- settings and followers that are replaced ------------------------------------------------------


def test_a_new_optimizer_with_a_new_schedule_average_and_limit(policy):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    first = torch.optim.SGD(model.parameters(), lr=1.0)
    step = TrainStep(model, first, policy=policy, scheduler=StepLR(first, 1, 0.5))
    run(step, classify, batches(2))
    second = torch.optim.SGD(model.parameters(), lr=0.25)
    step.optimizer = second
    with pytest.raises(UsageError, match=r"^scheduler: StepLR belongs to another optimizer"):
        step(classify, batches(1)[0])
    step.scheduler = StepLR(second, 1, 0.5)
    step.ema = AveragedModel(model)
    step.max_grad_norm = 1e-6
    before = model.weight.detach().clone()
    run(step, classify, batches(2))
    made = sum(not each.skipped for each in step.history[2:])
    assert second.param_groups[0]["lr"] == 0.25 * 0.5**made
    assert (model.weight - before).norm() <= 2e-6 * 0.25
    assert int(step.ema.n_averaged) == made
    step.scheduler = step.ema = step.max_grad_norm = None
    run(step, classify, batches(1))
    assert second.param_groups[0]["lr"] == 0.25 * 0.5**made


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_grad_norm", 0, "max_grad_norm: expected a norm above 0"),
        ("ema", nn.Linear(8, 4), "ema: expected a torch.optim.swa_utils.AveragedModel"),
        ("ema", AveragedModel(nn.Linear(8, 3)), "ema: its parameters have other shapes"),
        ("scheduler", "cosine", "scheduler: expected a learning-rate scheduler"),
    ],
)
def test_what_is_put_in_place_is_checked(name, value, words):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = TrainStep(model, optimizer, policy="fp32")
    with pytest.raises(UsageError, match=f"^{words}"):
        setattr(step, name, value)
    with pytest.raises(UsageError, match=f"^{words}"):
        TrainStep(model, optimizer, policy="fp32", **{name: value})
    step(classify, batches(1)[0])


def test_gradients_from_before_the_first_backward_are_dropped_and_named(policy):
    def trained(by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        if by_hand:
            classify(model, batches(1)[0]).backward()
            with pytest.warns(UserWarning, match=r"gradients of weight, bias were there before"):
                step(classify, batches(1)[0])
        else:
            step(classify, batches(1)[0])
        return values(model)

    assert same(trained(True), trained(False))


def test_gradients_of_zero_are_dropped_without_a_word(recwarn):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    run(TrainStep(model, optimizer, policy="fp32"), classify, batches(2))
    assert not list(recwarn)


def test_one_optimizer_where_several_are_expected_is_named():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, policy="fp32")
    with step.autocast():
        loss = classify(model, batches(1)[0])
    with pytest.raises(UsageError, match=r"optimizers: expected several, as in \[optimizer\]"):
        step.backward(loss, optimizers=optimizer)
