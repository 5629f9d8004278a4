"""Telemetry, shared settings, warnings and threads."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ampwise import LossScale, StepRecord, TrainStep

from .helpers import batches, classify, mlp, parameters
from .idioms import (
    SWITCHES,
    adamw,
    nothing_left_open,  # noqa: F401 - a fixture
    poisoned,
    records,
    run,
    sgd,
    values,
)

KEPT = 10_000
"""Records that `TrainStep.history` promises to keep."""


def living_records() -> int:
    gc.collect()
    return sum(type(each) is StepRecord for each in gc.get_objects())


# -- telemetry ---------------------------------------------------------------------------------


def test_telemetry_that_nobody_reads_is_bounded():
    """A long run without a look at history holds as many records as one with a look."""
    model = nn.Linear(1, 1)
    step = TrainStep(model, sgd(model, lr=1e-6), policy="fp32")
    x, before = torch.ones(1, 1), living_records()
    for _ in range(KEPT + 500):
        step(lambda m, b: m(b).sum(), x)
    assert living_records() - before <= KEPT + 100
    unread = step.drain()
    assert len(unread) <= KEPT
    assert unread[-1].step == KEPT + 500
    numbers = [record.step for record in step.history]
    assert numbers == list(range(501, KEPT + 501))


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("bad", BAD)
def test_the_norm_of_a_skipped_step_is_not_finite(policy, kind, bad, max_norm):
    """inf or NaN as documented, never the largest float32."""
    model = mlp()
    model[0].weight.register_hook(lambda g: torch.full_like(g, BAD[bad]))
    step = TrainStep(model, adamw(model, kind), policy=policy, max_grad_norm=max_norm)
    step(classify, batches(1)[0])
    (record,) = step.history
    assert record.skipped
    assert not math.isfinite(record.grad_norm)


def test_the_norm_of_a_step_that_overflows_under_the_loss_scale(kind):
    """Gradients of 1e3 are beyond float16 at 65536: the norm that was found is no number."""
    model = mlp()
    step = TrainStep(model, adamw(model, kind), policy="fp16", max_grad_norm=1.0)
    step(lambda m, b: classify(m, b) * 1e5, batches(1)[0])
    assert step.history[0].skipped
    assert not math.isfinite(step.history[0].grad_norm)


@pytest.mark.parametrize("skip", ["all", "each"])
def test_the_norm_of_a_step_of_which_one_optimizer_is_skipped(policy, skip):
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    step = TrainStep(models, optimizers, policy=policy, skip=skip)
    for model, factor in zip(models, (1.0, math.inf), strict=True):
        with step.autocast():
            loss = classify(model, batches(1)[0]) * factor
        step.backward(loss)
    step.update()
    (record,) = step.history
    assert record.skipped
    assert not math.isfinite(record.grad_norm)


# -- the loss scale is settings ----------------------------------------------------------------


def test_a_loss_scale_given_to_two_steps_is_settings_not_state():
    """One overflows; the other, and the instance, know nothing of it."""
    settings = LossScale(2.0**12, growth_interval=3)
    models = [mlp(), mlp()]
    one, other = (TrainStep(each, sgd(each), policy="fp16", loss_scale=settings) for each in models)
    (good,) = batches(1)
    run(one, classify, [poisoned(good)] * 2)
    assert one.loss_scale.value == 2.0**10
    assert other.loss_scale.value == 2.0**12
    assert settings.value == 2.0**12
    run(other, classify, [good] * 3)
    assert other.loss_scale.value == 2.0**13
    assert one.loss_scale.value == 2.0**10
    assert settings.value == 2.0**12


def test_two_steps_with_one_loss_scale_train_as_with_one_each():
    data, results = batches(6), []
    data[1] = poisoned(data[1])
    for shared in (True, False):
        settings = [LossScale(2.0**12, growth_interval=2) for _ in range(2)]
        models = [mlp(0), mlp(1)]
        steps = [
            TrainStep(each, sgd(each), policy="fp16", loss_scale=settings[0 if shared else index])
            for index, each in enumerate(models)
        ]
        for batch in data:
            for step in steps:
                step(classify, batch)
        results.append([parameters(each) for each in models])
        if shared:
            told = [records(step) for step in steps]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert told == [records(step) for step in steps]


def test_loading_a_state_into_one_step_leaves_the_other_alone():
    settings = LossScale(2.0**12)
    models = [mlp(), mlp()]
    one, other = (TrainStep(each, sgd(each), policy="fp16", loss_scale=settings) for each in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**5)
    scaler.scale(torch.ones(()))
    one.load_state_dict(scaler.state_dict())
    assert one.loss_scale.value == 2.0**5
    assert other.loss_scale.value == settings.value == 2.0**12


SCALES = {"fp16": True, "bf16:scaling=on": True, "fp16:scaling=off": False} | dict.fromkeys(
    ("fp32", "tf32", "bf16", "bf16-master"), False
)


@pytest.mark.parametrize("spelling", SCALES)
@pytest.mark.parametrize("given", [True, False])
def test_a_loss_scale_that_is_not_used_is_said(spelling, given):
    """And only then."""
    model = mlp()
    settings = {"loss_scale": LossScale(1024.0)} if given else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TrainStep(model, sgd(model), policy=spelling, **settings)
    said = [each for each in caught if "loss_scale" in str(each.message)]
    if SCALES[spelling] or not given:
        assert said == []
        return
    (warning,) = said
    assert issubclass(warning.category, UserWarning)
    assert warning.filename == __file__
    assert spelling in str(warning.message)
    assert "\n" not in str(warning.message)


# -- threads -----------------------------------------------------------------------------------


MODE = SWITCHES[0]


def in_threads(*works: Any) -> None:
    """Run functions at once, switching as often as Python can; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,), daemon=True) for each in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(each.is_alive() for each in threads), "the threads wait for each other"
    if errors:
        raise errors[0]


class Trainer:
    """Trains one model under a policy, and notes the switch wherever it can look."""

    def __init__(self, policy: str, steps: int = 30) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        self.step = TrainStep(self.model, sgd(self.model), policy=policy)
        self.steps, self.seen = steps, set()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.add(MODE.fp32_precision)
        out = model(batch[0])
        time.sleep(1e-4)  # let the others run in the middle of it
        out.register_hook(lambda _: self.seen.add(MODE.fp32_precision))
        self.seen.add(MODE.fp32_precision)
        return nn.functional.cross_entropy(out.float(), batch[1])

    def __call__(self) -> None:
        for batch in batches(self.steps):
            self.step(self.loss, batch)
            with torch.no_grad(), self.step.autocast():
                self.model(batch[0])
                self.seen.add(MODE.fp32_precision)


@pytest.mark.parametrize(
    "together", [("fp32", "tf32"), ("tf32", "bf16", "fp32"), ("fp32", "fp32"), ("tf32", "tf32")]
)
def test_threads_keep_their_float32_mode_to_themselves(together):
    """The switch is global in torch; each thread sees its own, and it ends as it began."""
    before = MODE.fp32_precision
    alone = []
    for each in together:
        trainer = Trainer(each)
        trainer()
        alone.append(values(trainer.model))
    trainers = [Trainer(each) for each in together]
    in_threads(*trainers)
    assert MODE.fp32_precision == before
    for each, trainer, expected in zip(together, trainers, alone, strict=True):
        if each in ("fp32", "tf32"):
            # The default, "none", is left where it means IEEE already.
            assert trainer.seen == {"bf16"} if each == "tf32" else trainer.seen <= {"ieee", "none"}
        for theirs, mine in zip(expected, values(trainer.model), strict=True):
            assert torch.equal(theirs, mine)


def test_an_error_in_one_thread_leaves_the_other_its_mode():
    before, other = MODE.fp32_precision, Trainer("tf32")
    model = mlp()
    step = TrainStep(model, sgd(model), policy="fp32")

    def fails() -> None:
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                step(lambda m, b: classify(m, b) / (1 // 0), batches(1)[0])

    in_threads(fails, other)
    assert MODE.fp32_precision == before
    assert other.seen == {"bf16"}
