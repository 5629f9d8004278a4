"""Invariant 3: whatever looks at a gradient sees the true one."""

from __future__ import annotations

import pytest
import torch

from ampwise.step import TrainStep

from .helpers import OPTIMIZERS, batches, classify, mlp, parameters


def true_gradient() -> torch.Tensor:
    model = mlp()
    classify(model, batches(1)[0]).backward()
    return model[0].weight.grad


def step_of(model, optimizer="adamw-fused", **settings) -> TrainStep:
    return TrainStep(model, OPTIMIZERS[optimizer](model.parameters()), policy="fp16", **settings)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=2e-2, atol=2e-4)  # float16 against float32


def test_tensor_hook_sees_and_returns_true_gradients():
    model, seen = mlp(), []

    def double(gradient):
        seen.append(gradient.clone())
        return gradient * 2

    handle = model[0].weight.register_hook(double)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp16")
    before = model[0].weight.detach().clone()
    step(classify, batches(1)[0])
    assert close(seen[0], true_gradient())
    assert close(before - model[0].weight, 2 * true_gradient())
    handle.remove()
    step(classify, batches(1)[0])
    assert len(seen) == 1


def test_post_accumulate_hook_sees_and_edits_true_gradients():
    model, seen = mlp(), []

    def clip(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.clamp_(-1e-3, 1e-3)

    model[0].weight.register_post_accumulate_grad_hook(clip)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp16")
    before = model[0].weight.detach().clone()
    step(classify, batches(1)[0])
    assert close(seen[0], true_gradient())
    assert (before - model[0].weight).abs().max() <= 1.001e-3


def test_a_hook_that_removes_itself_stays_removed():
    model, calls = mlp(), []
    handle = model[0].weight.register_hook(lambda g: (calls.append(1), handle.remove())[0])
    step = step_of(model)
    for batch in batches(3):
        step(classify, batch)
    assert len(calls) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_hooks_see_true_gradients(optimizer):
    model, seen = mlp(), {}
    step = step_of(model, optimizer)
    made = step.optimizer
    made.register_step_pre_hook(lambda o, a, k: seen.update(pre=model[0].weight.grad.clone()))
    made.register_step_post_hook(lambda o, a, k: seen.update(post=model[0].weight.grad.clone()))
    step(classify, batches(1)[0])
    assert close(seen["pre"], true_gradient())
    assert close(seen["post"], true_gradient())


def test_a_pre_hook_does_not_change_the_result():
    watched, plain = mlp(), mlp()
    one, other = step_of(watched), step_of(plain)
    one.optimizer.register_step_pre_hook(lambda o, a, k: None)
    for batch in batches(5):
        one(classify, batch)
        other(classify, batch)
    assert torch.equal(parameters(watched), parameters(plain))


def test_gradients_are_true_and_named():
    model = mlp()
    step = step_of(model)
    with step.autocast():
        loss = classify(model, batches(1)[0])
    step.backward(loss)
    seen = step.gradients()
    assert list(seen) == [name for name, _ in model.named_parameters()]
    assert close(seen["0.weight"], true_gradient())
