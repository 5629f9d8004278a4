"""Invariant 12: an exception leaves the step as before that call; discard, reset, half-way errors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampwise import InactivePolicyError, LossScale, SkippedStepsError, TrainStep, UsageError

from .helpers import batches, classify, mlp
from .idioms import (
    adamw,
    buffers,
    grads,
    held,
    nothing_left_open,  # noqa: F401 - a fixture
    open_contexts,
    poisoned,
    records,
    run,
    same,
    sgd,
    state_of,
    values,
)

ERRORS: dict[str, Callable[[], BaseException]] = {
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "user error": lambda: ValueError("shapes do not match"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "StopIteration": lambda: StopIteration("the loader is empty"),
    "GeneratorExit": GeneratorExit,
}


class Fuse(nn.Module):
    """Identity that raises in forward or backward when it is lit."""

    def __init__(self) -> None:
        super().__init__()
        self.lit: str | None = None
        self.error: BaseException = ValueError("lit")

    def forward(self, x: Tensor) -> Tensor:
        if self.lit == "forward":
            raise self.error
        return Burn.apply(x, self)


class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fuse.lit == "backward":
            raise ctx.fuse.error
        return gradient, None


class Net(nn.Module):
    """BatchNorm before the fuse in forward; the head behind it has its gradient before it burns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.fuse, self.head = Fuse(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fuse(self.norm(self.body(x)).relu()))


Things = tuple[Net, torch.optim.Optimizer, TrainStep]


def things(policy: str, kind: str = "plain", **settings: Any) -> Things:
    model = Net()
    optimizer = adamw(model, kind)
    if policy == "fp16":
        settings = {"loss_scale": LossScale(2.0**10)} | settings
    return (
        model,
        optimizer,
        TrainStep(model, optimizer, policy=policy, **{"accumulate": 3} | settings),
    )


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> dict[str, Any]:
    """All that must be as before."""
    return {
        "position": step.position,
        "steps": step.steps,
        "boundary": step.boundary,
        "history": records(step),
        "scale": step.loss_scale.state_dict(),
        "parameters": values(model),
        "identities": [id(each) for each in model.parameters()],
        "held": [id(each) for each in held(optimizer)],
        "kinds": [(type(each), each.dtype, each.is_leaf) for each in model.parameters()],
        "gradients": grads(model),
        "buffers": buffers(model),
        "optimizer": state_of(optimizer)["state"],
    }


def assert_as_before(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [name for name in before if not same(before[name], after[name])]
    assert not changed, f"changed by a call that raised: {', '.join(changed)}"


def assert_outside() -> None:
    """No context of the step is left open."""
    left = open_contexts()
    assert not left["autocast"]
    assert left["autocast regions"] == 0
    assert left["grad"]
    assert "bf16" not in left["float32 modes"]


# -- where it can happen -----------------------------------------------------------------------


def in_forward(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    model.fuse.lit, model.fuse.error = "forward", error
    return lambda: setattr(model.fuse, "lit", None)


def in_backward(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    model.fuse.lit, model.fuse.error = "backward", error
    return lambda: setattr(model.fuse, "lit", None)


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        raise error

    return hook


def in_gradient_hook(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    return model.body.weight.register_hook(raising(error)).remove


def in_accumulated_hook(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    return model.body.weight.register_post_accumulate_grad_hook(raising(error)).remove


def in_module_hook(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    return model.head.register_forward_pre_hook(raising(error)).remove


def before_optimizer(model: Net, optimizer: Any, error: BaseException) -> Callable[[], None]:
    return optimizer.register_step_pre_hook(raising(error)).remove


ANYWHERE = {
    each.__name__: each
    for each in (in_forward, in_backward, in_gradient_hook, in_accumulated_hook, in_module_hook)
}


@pytest.mark.parametrize(
    ("where", "position"),
    [*itertools.product(ANYWHERE, [0, 1, 2]), ("before_optimizer", 2)],
)
def test_a_micro_batch_that_raises_has_not_been(where, position, policy, kind):
    """Everything is as before it; tried again, training is that of a run without the error."""
    data = batches(9)
    whole, hurt = things(policy, kind), things(policy, kind)
    run(whole[2], classify, data)
    model, optimizer, step = hurt
    run(step, classify, data[: 3 + position])
    before = everything(*hurt)
    heal = (ANYWHERE | {"before_optimizer": before_optimizer})[where](
        model, optimizer, ValueError("a hole")
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="a hole"):
            step(classify, data[3 + position])
        assert_outside()
        assert_as_before(before, everything(*hurt))
    heal()
    run(step, classify, data[3 + position :])
    assert_as_before(everything(*whole) | {"identities": 0, "held": 0},
                     everything(*hurt) | {"identities": 0, "held": 0})  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["in_forward", "in_backward", "before_optimizer"])
def test_errors_of_every_kind_come_out_as_they_are(where, error, policy):
    """The very exception, whatever it is, and the step as before."""
    hurt = model, optimizer, step = things(policy)
    data = batches(3)
    run(step, classify, data[:2])
    before = everything(*hurt)
    every = ANYWHERE | {"before_optimizer": before_optimizer}
    raises = ERRORS[error]()
    heal = every[where](model, optimizer, raises)
    with pytest.raises(type(raises)) as raised:
        step(classify, data[2])
    assert raised.value is raises
    assert_outside()
    assert_as_before(before, everything(*hurt))
    heal()
    step(classify, data[2])
    assert step.boundary
    assert step.steps == 1


def test_an_error_in_the_very_first_forward_leaves_it_the_first(policy):
    """What the first forward ran in is still found out, in the next."""
    hurt = model, optimizer, step = things(policy, accumulate=1)
    before = everything(*hurt)
    heal = in_forward(model, optimizer, ValueError("a hole"))
    with pytest.raises(ValueError, match="a hole"):
        step(classify, batches(1)[0])
    assert_as_before(before, everything(*hurt))
    heal()
    assert step.activity is None
    step(classify, batches(1)[0])
    assert step.activity is not None
    assert sum(step.activity.matmul_dtypes.values()) >= 2


def test_a_loss_that_is_refused_has_not_been(policy):
    """Its forward has run: BatchNorm counted it, and must not."""
    hurt = _, _, step = things(policy)
    data = batches(2)
    step(classify, data[0])
    before = everything(*hurt)
    for wrong in (lambda m, b: m(b[0]), lambda m, b: classify(m, b).item(),
                  lambda m, b: classify(m, b).detach(), lambda m, b: None):  # fmt: skip
        with pytest.raises(UsageError):
            step(wrong, data[1])
        assert_as_before(before, everything(*hurt))
        assert_outside()


def test_samples_that_raise_have_not_been(policy):
    model, fails = Net(), [False]

    def samples(batch: Any) -> int:
        if fails[0]:
            raise KeyError("mask")
        return 8

    optimizer = adamw(model)
    step = TrainStep(model, optimizer, policy=policy, accumulate=3, samples=samples)
    data = batches(3)
    step(classify, data[0])
    before = everything(model, optimizer, step)
    fails[0] = True
    with pytest.raises(KeyError, match="mask"):
        step(classify, data[1])
    assert_as_before(before, everything(model, optimizer, step))


def test_an_error_in_a_retained_checkpoint_comes_out(policy):
    """Recomputation happens in backward; its error, too."""
    model = Net()
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, policy=policy, accumulate=2)
    data = batches(2)

    def loss_fn(m: Net, batch: Any) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(m, batch[0], use_reentrant=False)
        m.fuse.lit = "forward" if batch is data[1] else None
        return nn.functional.cross_entropy(out, batch[1])

    step(loss_fn, data[0])
    before = everything(model, optimizer, step)
    with pytest.raises(ValueError, match="lit"):
        step(loss_fn, data[1])
    model.fuse.lit = None
    assert_outside()
    assert_as_before(before, everything(model, optimizer, step))


def test_inside_an_island_autocast_comes_back_on(policy):
    if policy not in ("bf16", "fp16", "bf16-master"):
        policy = "bf16"
    model = Net()
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, policy=f"{policy}:islands=fuse+head", accumulate=2)
    data = batches(2)
    step(classify, data[0])
    before = everything(model, optimizer, step)
    for where in (in_forward, in_backward, in_module_hook):
        heal = where(model, optimizer, ValueError("a hole"))
        with pytest.raises(ValueError, match="a hole"):
            step(classify, data[1])
        heal()
        assert_outside()
        assert_as_before(before, everything(model, optimizer, step))
    seen = []
    model.body.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    step(classify, data[1])
    assert seen == [torch.float16 if policy == "fp16" else torch.bfloat16]


# -- by parts ----------------------------------------------------------------------------------


def test_an_error_inside_autocast_undoes_the_forward(policy):
    """BatchNorm as before; parameters are the user's; autocast is off."""
    hurt = model, _, step = things(policy)
    data = batches(2)
    step(classify, data[0])
    before = everything(*hurt)
    model.fuse.lit = "forward"
    with pytest.raises(ValueError, match="lit"), step.autocast():
        classify(model, data[1])
    model.fuse.lit = None
    assert_outside()
    assert_as_before(before, everything(*hurt))
    with pytest.raises(KeyboardInterrupt), step.autocast():
        classify(model, data[1])
        raise KeyboardInterrupt
    assert_as_before(before, everything(*hurt))


def test_a_backward_that_raises_leaves_gradients_of_before_bit_for_bit(policy, kind):
    model, _, step = things(policy, kind)
    data = batches(2)

    def loss_of(batch: Any) -> Tensor:
        with step.autocast():
            return classify(model, batch)

    step.backward(loss_of(data[0]))
    loss, before = loss_of(data[1]), grads(model)
    model.fuse.lit = "backward"
    with pytest.raises(ValueError, match="lit"):
        step.backward(loss)
    assert same(before, grads(model))
    assert step.position == 1
    assert_outside()
    model.fuse.lit = None
    step.backward(loss_of(data[1]))
    assert step.position == 2
    step.update()
    assert not step.history[0].skipped


@pytest.mark.parametrize("looked", [False, True])
def test_an_update_that_raises_can_be_called_again(policy, kind, looked):
    """Gradients are still there, and divided by the scale once, not twice."""
    data, results = batches(1)[0], []
    for fails in (False, True):
        every = model, optimizer, step = things(policy, kind, accumulate=1, max_grad_norm=0.5)
        with step.autocast():
            loss = classify(model, data)
        step.backward(loss)
        if looked:
            step.gradients()
        if fails:
            before = everything(*every)
            heal = before_optimizer(model, optimizer, ValueError("a hole"))
            for _ in range(2):
                with pytest.raises(ValueError, match="a hole"):
                    step.update()
                assert_as_before(before, everything(*every))
            heal()
        step.update()
        results.append((values(model), records(step)))
    assert same(results[0], results[1])


def test_the_second_of_two_optimizers_raises():
    """The first has moved what it moved; the step is as before, its gradients are there."""
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy="fp16", loss_scale=LossScale(2.0**10))
    data = batches(1)[0]
    for model in models:
        with step.autocast():
            loss = classify(model, data)
        step.backward(loss)
    before = [grads(each) for each in models], step.position, step.steps, records(step)
    handle = optimizers[1].register_step_pre_hook(raising(ValueError("a hole")))
    with pytest.raises(ValueError, match="a hole"):
        step.update()
    after = [grads(each) for each in models], step.position, step.steps, records(step)
    assert same(list(before), list(after))
    handle.remove()


def test_an_error_of_the_scheduler_leaves_the_books_in_order(policy):
    """It comes after the optimizer, which cannot be undone: counted or not, but not half."""

    class Late(StepLR):
        fails = False

        def step(self, *args: Any) -> None:
            if self.fails:
                raise ValueError("a hole")
            super().step(*args)

    model = mlp()
    optimizer = sgd(model)
    scheduler = Late(optimizer, 1)
    step = TrainStep(model, optimizer, policy=policy, scheduler=scheduler)
    data = batches(3)
    step(classify, data[0])
    before, scheduler.fails = values(model), True
    with pytest.raises(ValueError, match="a hole"):
        step(classify, data[1])
    scheduler.fails = False
    assert len(step.history) == step.steps
    assert step.history[-1].step == step.steps
    assert step.position == 0
    assert grads(model) == [None] * 4
    step(classify, data[2])
    assert not same(before, values(model))


def test_a_state_that_cannot_be_loaded_changes_nothing(policy):
    source, other = things(policy), things(policy)
    data = batches(5)
    run(source[2], classify, data)
    run(other[2], classify, data[:1])
    state, before = source[2].state_dict(), everything(*other)
    for key in state:
        broken = {name: value for name, value in copy.deepcopy(state).items() if name != key}
        try:
            other[2].load_state_dict(broken)
        except (UsageError, KeyError):
            assert_as_before(before, everything(*other))
        else:
            break  # an entry that it can do without: nothing to undo
    for wrong in (None, {}, {"model": 1}, [1, 2]):
        with pytest.raises(UsageError):
            things(policy)[2].load_state_dict(wrong)


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_a_refusal_to_train_in_another_precision_leaves_no_window(asked):
    """``strict`` raises in the first forward."""

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.body(x.float())

    model = Stubborn()
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, policy=asked, strict=True)
    before = everything(model, optimizer, step)
    with pytest.raises(InactivePolicyError):
        step(classify, batches(1)[0])
    assert_as_before(before, everything(model, optimizer, step))


def test_after_too_many_skips_the_step_can_be_rolled_back(policy):
    """`SkippedStepsError` ends a window like any other; load, reset and go on."""
    every = model, _, step = things(policy, accumulate=1, max_skips=3)
    data = batches(3)
    run(step, classify, data[:1])
    saved = copy.deepcopy([each.state_dict() for each in every])
    with pytest.raises(SkippedStepsError):
        run(step, classify, [poisoned(data[1])] * 3)
    assert step.position == 0
    assert grads(model) == [None] * len(grads(model))
    for each, state in zip(every, saved, strict=True):
        each.load_state_dict(state)
    once = things(policy, accumulate=1, max_skips=3)
    run(once[2], classify, data)
    run(step, classify, data[1:])
    assert same(values(once[0]), values(model))
    assert same(buffers(once[0]), buffers(model))


# -- discard -----------------------------------------------------------------------------------


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("position", [1, 2])
def test_discard_drops_the_open_window(policy, kind, position, looked):
    """Gradients None, buffers as before the window; training goes on as if it had not been."""
    data, extra = batches(9), batches(2, seed=8)
    extra[0] = poisoned(extra[0])
    whole, hurt = things(policy, kind), things(policy, kind)
    run(whole[2], classify, data)
    model, _, step = hurt
    run(step, classify, data[:3])
    before = everything(*hurt) | {"boundary": False}
    run(step, classify, extra[:position])
    if looked:
        step.gradients()
    step.discard()
    assert grads(model) == [None] * len(grads(model))
    assert_as_before(before, everything(*hurt) | {"boundary": False})
    run(step, classify, data[3:])
    neutral = {"identities": 0, "held": 0}
    assert_as_before(everything(*whole) | neutral, everything(*hurt) | neutral)


def test_discard_without_a_window_does_nothing(policy):
    every = _, _, step = things(policy)
    data = batches(3)
    step.discard()
    run(step, classify, data)
    before = everything(*every)
    step.discard()
    assert_as_before(before | {"boundary": 0}, everything(*every) | {"boundary": 0})


def test_discard_after_a_forward_without_a_backward(policy):
    """The user changed their mind about a micro-batch: its BatchNorm update goes, too."""
    every = model, _, step = things(policy)
    data = batches(2)
    before = everything(*every)
    with step.autocast():
        classify(model, data[0])
    step.discard()
    assert_as_before(before, everything(*every))


def test_discard_between_two_updates_of_an_iteration():
    """What the first of two optimizers found is forgotten with the window."""
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy="fp16")
    data = batches(1)[0]
    step.backward(classify(models[0], data) * torch.inf, optimizers=optimizers[:1])
    step.update(optimizers[:1], update_scale=False)
    step.backward(classify(models[1], data), optimizers=optimizers[1:])
    step.discard()
    assert step.position == 0
    assert [grads(each) for each in models] == [[None] * 4] * 2
    for model, optimizer in zip(models, optimizers, strict=True):
        step.backward(classify(model, data), optimizers=[optimizer])
    step.update()
    (record,) = step.history
    assert not record.skipped
    assert step.loss_scale.value == 2.0**16


# -- reset -------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_window", [False, True])
def test_reset_after_a_rollback_is_a_fresh_step(policy, kind, open_window):
    """Model and optimizer loaded by the user, the step reset: all over again, bit for bit."""

    def made() -> Things:
        scale = {"loss_scale": LossScale(2.0**10, growth_interval=2)} if policy == "fp16" else {}
        return things(policy, kind, max_grad_norm=0.5, max_skips=4, **scale)

    fresh, worn = made(), made()
    data = batches(10)
    saved = copy.deepcopy([each.state_dict() for each in worn[:2]])
    bad = [poisoned(each) for each in data[:3]]
    run(worn[2], classify, [*data[:6], *bad, *bad])
    assert worn[2].history[-1].skipped_total == 2
    if open_window:
        run(worn[2], classify, data[:2])
    for each, state in zip(worn[:2], saved, strict=True):
        each.load_state_dict(state)
    worn[2].reset()
    neutral = {"identities": 0, "held": 0, "boundary": 0}
    assert_as_before(everything(*fresh) | neutral, everything(*worn) | neutral)
    assert worn[2].poll() == []
    assert worn[2].drain() == []
    assert same(fresh[2].state_dict(), worn[2].state_dict())
    for each in (fresh, worn):
        run(each[2], classify, [*bad, *bad, *bad, *data[:9]])
    assert_as_before(everything(*fresh) | neutral, everything(*worn) | neutral)


def test_reset_puts_the_loss_scale_at_its_initial_value_also_after_a_load():
    """The initial value is a setting: that of the constructor, not of the loaded state."""
    model, data = mlp(), batches(1)
    step = TrainStep(model, sgd(model), policy="fp16", loss_scale=LossScale(2.0**12))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**5)
    scaler.scale(torch.ones(()))
    step.load_state_dict(scaler.state_dict())
    step(classify, data[0])
    assert step.loss_scale.value == 2.0**5
    step.reset()
    assert step.loss_scale.value == 2.0**12


def test_reset_keeps_schedule_and_average_in_the_users_hands(policy):
    """They are the user's to roll back; a skip before the reset holds no step after it."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    step = TrainStep(model, optimizer, policy=policy, scheduler=scheduler, ema=ema)
    (good,) = batches(1)
    run(step, classify, [good, poisoned(good)])
    step.reset()
    assert scheduler.last_epoch == 1
    run(step, classify, [good, good])
    assert scheduler.last_epoch == 3
    assert int(ema.n_averaged) == 3
    assert [each.step for each in step.history] == [1, 2]


class Failing(torch.optim.SGD):
    """Raises once, before it steps."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("boom")
        return super().step(closure)


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_gradients_that_only_earlier_micro_batches_made_survive_an_error(policy, max_grad_norm):
    def trained(fails: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
        optimizer = Failing(model.parameters(), lr=0.1)
        step = TrainStep(model, optimizer, policy=policy, accumulate=2, max_grad_norm=max_grad_norm)
        x = torch.randn(8, 4)
        step(lambda m, b: (m["a"](b) + m["b"](b)).float().square().mean(), x)
        optimizer.fails = fails
        second = lambda m, b: m["b"](b).float().square().mean()  # noqa: E731
        if fails:
            with pytest.raises(ValueError, match="boom"):
                step(second, x)
        step(second, x)
        return values(model)

    assert same(trained(True), trained(False))
