"""Scheduler, EMA, several optimizers, state: what follows the outcome of a step."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampwise.errors import UsageError
from ampwise.step import LossScale, TrainStep
from ampwise.step.host import Outcomes

from .helpers import OPTIMIZERS, batches, classify, mlp, parameters


def with_bad(count: int, *bad: int) -> list:
    data = batches(count)
    for index in bad:
        data[index][0].fill_(float("inf"))
    return data


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-plain"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_scheduler_and_ema_hold_on_skipped_steps(precision, optimizer):
    model = mlp()
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    step = TrainStep(model, made, policy=precision, scheduler=scheduler, ema=ema)
    for batch in with_bad(6, 0, 3):
        step(classify, batch)
    assert scheduler.last_epoch == 4
    assert int(ema.n_averaged) == 4
    lrs = [record.lr for record in step.history]
    assert lrs == [1e-2, 1e-2, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3]


def test_scheduler_that_learns_late_holds_one_step_later(monkeypatch):
    """An accelerator's outcome is known at the next step: same number of steps in the end."""
    late: list[bool] = []

    def settle(self, found_inf) -> list[bool]:
        known = late.copy()
        late[:] = [found_inf.read()]
        return known

    monkeypatch.setattr(Outcomes, "settle", settle)
    model = mlp()
    made = OPTIMIZERS["adamw-fused"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    step = TrainStep(model, made, policy="fp16", scheduler=scheduler)
    for batch in with_bad(6, 1):
        step(classify, batch)
    assert scheduler.last_epoch == 5


class TestSeveralOptimizers:
    """A GAN's shape: two models, two optimizers, one loss scale."""

    @staticmethod
    def pair(skip="all", fused=True, **settings):
        torch.manual_seed(0)
        models = [nn.Linear(8, 2), nn.Linear(8, 2)]
        made = [torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in models]
        return models, made, TrainStep(models, made, policy="fp16", skip=skip, **settings)

    @staticmethod
    def backward(step, models, made, bad=None):
        x = torch.randn(4, 8)
        for index, model in enumerate(models):
            with step.autocast():
                loss = model(x).float().square().mean() * (1e30 if index == bad else 1.0)
            step.backward(loss, optimizers=[made[index]])

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize(("skip", "moved"), [("each", [False, True]), ("all", [False, False])])
    def test_a_failing_one_is_skipped_alone_or_with_the_others(self, skip, moved, fused):
        models, made, step = self.pair(skip, fused)
        before = [parameters(each) for each in models]
        self.backward(step, models, made, bad=0)
        step.update()
        after = [parameters(each) for each in models]
        seen = [not torch.equal(b, a) for b, a in zip(before, after, strict=True)]
        assert seen == moved

    def test_the_scale_updates_once_and_both_use_the_same(self):
        """Trap 3: torch's per-optimizer update unscales the second with the halved scale."""
        models, made, step = self.pair("each")
        reference = copy.deepcopy(models[1])
        torch.manual_seed(5)
        self.backward(step, models, made, bad=0)
        step.update()
        assert step.loss_scale.value == 2.0**15
        torch.manual_seed(5)
        alone = TrainStep(reference, torch.optim.SGD(reference.parameters(), lr=0.1, fused=True),
                          policy="fp16")  # fmt: skip
        alone(lambda m, x: m(x).float().square().mean(), torch.randn(4, 8))
        assert torch.equal(parameters(reference), parameters(models[1]))

    def test_losses_of_one_iteration_add_up(self):
        model = nn.Linear(8, 1)
        before = parameters(model)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
        x = torch.ones(2, 8)
        for factor in (1.0, 2.0):
            step.backward(model(x).mean() * factor)
        step.update()
        assert torch.allclose(before - parameters(model), torch.full((9,), 3.0).double())

    def test_two_updates_in_an_iteration_adapt_the_scale_once(self):
        models, made, step = self.pair("each", loss_scale=LossScale(256.0, growth_interval=2))
        for _ in range(2):
            x = torch.randn(4, 8)
            for index, model in enumerate(models):
                with step.autocast():
                    loss = model(x).float().square().mean()
                step.backward(loss, optimizers=[made[index]])
                step.update([made[index]], update_scale=index == 1)
        assert step.loss_scale.value == 512.0
        assert [record.step for record in step.history] == [1, 2]

    @staticmethod
    def in_turns(step, models, made, weights):
        """Each optimizer steps after two micro-batches of its own; the parameters' steps."""
        before = [parameters(each) for each in models]
        inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
        for index, model in enumerate(models):
            for x, weight in zip(inputs, weights, strict=True):
                step.backward(model(x).square().mean(), optimizers=[made[index]], weight=weight)
            step.update([made[index]], update_scale=index == 1)
        return torch.cat([b - parameters(m) for b, m in zip(before, models, strict=True)])

    def test_weights_are_among_losses_of_the_same_optimizer(self):
        """Each optimizer's gradient is the mean over its own samples, whoever stepped before it."""
        steps, losses = [], []
        for weights in ((None, None), (3, 3), (torch.tensor(3.0), torch.tensor(3.0))):
            models, made, step = self.pair(accumulate=2, loss_scale=LossScale(1.0))
            steps.append(self.in_turns(step, models, made, weights))
            losses.append(step.history[0].loss)
        for found, loss in zip(steps[1:], losses[1:], strict=True):
            torch.testing.assert_close(found, steps[0], rtol=1e-6, atol=1e-8)
            assert loss == pytest.approx(losses[0])

    def test_weights_of_different_optimizers_are_not_mixed(self):
        models, made, step = self.pair()
        x = torch.ones(1, 8)
        step.backward(models[0](x).sum(), optimizers=[made[0]], weight=1)
        with pytest.raises(UsageError, match=r"call update\(optimizers, update_scale=False\)"):
            step.backward(models[1](x).sum(), optimizers=[made[1]], weight=1)

    def test_backward_reaches_only_the_named_optimizers_parameters(self):
        models, made, step = self.pair()
        x = torch.randn(4, 8)
        with step.autocast():
            loss = (models[0](x) + models[1](x)).float().square().mean()
        step.backward(loss, optimizers=[made[0]])
        assert models[0].weight.grad is not None
        assert models[1].weight.grad is None

    def test_a_foreign_optimizer_is_refused(self):
        models, _, step = self.pair()
        with pytest.raises(UsageError, match="some of those the step was made with"):
            step.backward(models[0](torch.ones(1, 8)).sum(), optimizers=[
                torch.optim.SGD(models[0].parameters(), lr=0.1)])  # fmt: skip


class TestState:
    """Invariant 8: what is saved is enough to go on bit for bit."""

    @staticmethod
    def make(precision, optimizer, accumulate):
        model = mlp()
        made = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.9)
        step = TrainStep(
            model, made, policy=precision, accumulate=accumulate, max_grad_norm=0.5,
            scheduler=scheduler, loss_scale=LossScale(growth_interval=5),
        )  # fmt: skip
        return model, made, scheduler, step

    @pytest.mark.parametrize("stop", [7, 8, 13])
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-plain"])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-master"])
    def test_a_resumed_run_continues_bit_for_bit(self, precision, optimizer, accumulate, stop):
        """Also mid growth interval, with skips behind it, and in the middle of a window."""
        data = with_bad(24, 4, 10)
        whole, _, _, whole_step = self.make(precision, optimizer, accumulate)
        for batch in data:
            whole_step(classify, batch)

        parts = self.make(precision, optimizer, accumulate)
        for batch in data[:stop]:
            parts[3](classify, batch)
        file = io.BytesIO()
        torch.save([each.state_dict() for each in parts], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        resumed = self.make(precision, optimizer, accumulate)
        for each, state in zip(resumed, states, strict=True):
            each.load_state_dict(state)
        for batch in data[stop:]:
            resumed[3](classify, batch)

        assert torch.equal(parameters(whole), parameters(resumed[0]))
        assert whole_step.loss_scale.state_dict() == resumed[3].loss_scale.state_dict()
        tail = resumed[3].history
        assert [repr(r) for r in whole_step.history[-len(tail) :]] == [repr(r) for r in tail]

    def test_gradscaler_state_loads(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        scaler.scale(torch.ones(()))
        model = mlp()
        step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()), policy="fp16")
        step.load_state_dict(scaler.state_dict())
        assert step.loss_scale.value == 512.0

    def test_a_foreign_state_is_refused(self):
        model = mlp()
        step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()))
        with pytest.raises(UsageError, match="step state lacks policy"):
            step.load_state_dict({"model": 1})


def test_records_count_growths_and_backoffs():
    model = mlp()
    step = TrainStep(
        model,
        OPTIMIZERS["adamw-fused"](model.parameters()),
        policy="fp16",
        loss_scale=LossScale(growth_interval=2),
    )
    for batch in with_bad(40, 0, 3):  # more than one chunk of the ring
        step(classify, batch)
    records = step.history
    assert [r.step for r in records] == list(range(1, 41))
    assert [(r.scale_growths, r.scale_backoffs, r.skipped_total) for r in records[:5]] == [
        (0, 1, 1), (0, 1, 1), (1, 1, 1), (1, 2, 2), (1, 2, 2),
    ]  # fmt: skip
    assert [r.loss_scale for r in records[:5]] == [65536, 32768, 32768, 65536, 32768]


def test_poll_gives_each_record_once_also_around_history():
    model = mlp()
    step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()))
    data = batches(6)
    step(classify, data[0])
    assert [r.step for r in step.poll()] == [1]
    step(classify, data[1])
    assert [r.step for r in step.history] == [1, 2]
    step(classify, data[2])
    step.state_dict()
    assert [r.step for r in step.poll()] == [2, 3]
    assert step.drain() == []
    assert len(step.history) == 3


def test_autocast_is_for_evaluation_too():
    model = mlp()
    step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()), policy="bf16")
    with torch.no_grad(), step.autocast():
        assert F.linear(torch.ones(2, 8), model[0].weight).dtype == torch.bfloat16
