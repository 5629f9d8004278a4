"""`ampwise.Engine`: what a trainer that owns its loop needs of the step, and nothing else."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampwise
from ampwise import LossScale, TrainStep, UsageError

from .helpers import batches, classify, mlp, parameters
from .idioms import (
    ByHand,
    adamw,
    assert_follows,
    buffers,
    grads,
    nothing_left_open,  # noqa: F401 - a fixture
    poisoned,
    run,
    same,
    sgd,
    state_of,
    values,
)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(engine: Any, model: nn.Module, batch: Any, factor: float = 1.0) -> Tensor:
    with engine.autocast():
        return classify(model, batch) * factor


def one(engine: Any, model: nn.Module, batch: Any) -> None:
    """An optimizer step of a trainer's loop."""
    engine.backward(loss_of(engine, model, batch))
    engine.update()


def test_the_constructor_is_the_steps_without_what_needs_a_whole_step():
    names = [set(inspect.signature(each).parameters) for each in (TrainStep, ampwise.Engine)]
    assert names[0] - names[1] == {"accumulate", "samples", "scheduler", "ema", "on_fault"}
    assert names[1] <= names[0]


def test_it_trains_as_by_hand(policy, kind):
    ours, hand = normed(), normed()
    start = parameters(ours)
    engine = ampwise.Engine(ours, sgd(ours, kind, momentum=0.9), policy=policy)
    loop = ByHand(hand, sgd(hand, kind, momentum=0.9), policy)
    for batch in batches(5):
        one(engine, ours, batch)
        loop(classify, batch)
    assert_follows(ours, hand, start, policy)
    assert len(engine.history) == 5
    assert engine.policy.name == policy


def test_accumulation_is_the_callers(policy, kind):
    """Losses add up until `update`, as in torch."""
    ours, hand = mlp(), mlp()
    start = parameters(ours)
    engine = ampwise.Engine(ours, sgd(ours, kind), policy=policy)
    loop = ByHand(hand, sgd(hand, kind), policy, accumulate=4)
    for index, batch in enumerate(batches(8)):
        loop(classify, batch)
        engine.backward(loss_of(engine, ours, batch) / 4)
        if index % 4 == 3:
            engine.update()
    assert len(engine.history) == 2
    assert_follows(ours, hand, start, policy)


def test_it_follows_the_train_step_bit_for_bit(policy, kind):
    """One layer above, the same numbers: norms, scale, clipping, skips."""
    ours, theirs, results = normed(), normed(), []
    settings: dict[str, Any] = {"policy": policy, "max_grad_norm": 0.3}
    data = batches(8)
    data[3] = poisoned(data[3])
    for model, of in ((ours, ampwise.Engine), (theirs, TrainStep)):
        if policy == "fp16":
            settings["loss_scale"] = LossScale(2.0**12, growth_interval=2)
        driver = of(model, adamw(model, kind), **settings)
        for batch in data:
            one(driver, model, batch)
        results.append([repr(each) for each in driver.history])
    assert results[0] == results[1]
    assert same(values(ours), values(theirs))
    assert same(buffers(ours), buffers(theirs))


def test_a_skipped_step_leaves_nothing_behind(policy, kind):
    model, (good,) = normed(), batches(1)
    optimizer = adamw(model, kind)
    engine = ampwise.Engine(model, optimizer, policy=policy)
    one(engine, model, good)
    before = values(model), buffers(model), state_of(optimizer)["state"]
    one(engine, model, poisoned(good))
    assert engine.history[-1].skipped
    assert same(before, (values(model), buffers(model), optimizer.state_dict()["state"]))
    if policy == "fp16":
        assert engine.loss_scale.value == 2.0**15


def test_gradients_are_true_and_the_optimizers_own(policy):
    model, reference, (batch,) = mlp(), mlp(), batches(1)
    engine = ampwise.Engine(model, sgd(model), policy=policy)
    engine.backward(loss_of(engine, model, batch))
    classify(reference, batch).backward()
    seen = engine.gradients()
    for name, each in reference.named_parameters():
        assert seen[name] is dict(model.named_parameters())[name].grad
        assert (seen[name] - each.grad).norm() <= 0.05 * each.grad.norm()


def test_several_optimizers_and_one_scale():
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(each) for each in models]
    engine = ampwise.Engine(models, optimizers, policy="fp16", skip="each")
    before = [values(each) for each in models]
    for index, factor in ((0, math.inf), (1, 1.0)):
        engine.backward(
            loss_of(engine, models[index], batches(1)[0], factor), optimizers=[optimizers[index]]
        )
        engine.update([optimizers[index]], update_scale=index == 1)
    assert same(before[0], values(models[0]))
    assert not same(before[1], values(models[1]))
    assert engine.loss_scale.value == 2.0**15
    (record,) = engine.history
    assert record.skipped


def test_a_resumed_engine_continues_bit_for_bit(policy, kind):
    def made() -> tuple[Any, ...]:
        model = normed()
        optimizer = adamw(model, kind)
        settings = {"loss_scale": LossScale(2.0**12, growth_interval=3)} if policy == "fp16" else {}
        return model, optimizer, ampwise.Engine(model, optimizer, policy=policy, **settings)

    data = batches(8)
    data[2] = poisoned(data[2])
    whole, cut, resumed = made(), made(), made()
    for batch in data:
        one(whole[2], whole[0], batch)
    for batch in data[:4]:
        one(cut[2], cut[0], batch)
    for there, here in zip(cut, resumed, strict=True):
        here.load_state_dict(copy.deepcopy(there.state_dict()))
    for batch in data[4:]:
        one(resumed[2], resumed[0], batch)
    assert same(values(whole[0]), values(resumed[0]))
    assert same(buffers(whole[0]), buffers(resumed[0]))
    tail = [repr(each) for each in resumed[2].history][-4:]
    assert tail == [repr(each) for each in whole[2].history][-4:]


def test_engines_one_after_the_other_and_beside_a_step(policy):
    ours, hand = mlp(), mlp()
    start, mine, theirs = parameters(ours), sgd(ours), sgd(hand)
    data = batches(6)
    loop = ByHand(hand, theirs, policy)
    for batch in data[:2]:
        one(ampwise.Engine(ours, mine, policy=policy), ours, batch)
    run(TrainStep(ours, mine, policy=policy), classify, data[2:4])
    engine = ampwise.Engine(ours, mine, policy=policy)
    for batch in data[4:]:
        one(engine, ours, batch)
    run(loop, classify, data)
    assert_follows(ours, hand, start, policy)


def test_an_error_leaves_the_engine_as_before(policy, kind):
    model, data = normed(), batches(2)
    engine = ampwise.Engine(model, sgd(model, kind), policy=policy)
    one(engine, model, data[0])
    stats = buffers(model)
    with pytest.raises(ZeroDivisionError):
        loss_of(engine, model, data[1], 1 // 0)
    assert same(stats, buffers(model))
    handle = model[0].weight.register_hook(lambda g: 1 // 0)
    loss = loss_of(engine, model, data[1])
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    assert grads(model) == [None] * len(grads(model))
    handle.remove()
    one(engine, model, data[1])
    assert not engine.history[-1].skipped


def test_misuse_is_refused_as_by_the_step():
    model = mlp()
    for wrong in ({"optimizer": None}, {"model": None}, {"policy": torch.bfloat16}):
        with pytest.raises(UsageError):
            ampwise.Engine(**{"model": model, "optimizer": sgd(model), "policy": "fp32"} | wrong)
    engine = ampwise.Engine(model, sgd(model), policy="fp32")
    with pytest.raises(UsageError, match="without a backward"):
        engine.update()
