"""Loops with several optimizers, by the step's parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampwise.errors import UsageError
from ampwise.step import LossScale, TrainStep


def pair(precision="fp32", **settings):
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    return models, optimizers, TrainStep(models, optimizers, policy=precision, **settings)


def loss_of(step, model):
    with step.autocast():
        return model(torch.ones(3, 4)).float().square().mean()


def test_looking_at_the_gradients_of_one_optimizer_leaves_the_others_free():
    models, (d, g), step = pair()
    for _ in range(2):
        step.backward(loss_of(step, models[0]), optimizers=[d])
        assert set(step.gradients()) == {"0.weight", "0.bias"}
        step.update([d], update_scale=False)
        step.backward(loss_of(step, models[1]), optimizers=[g])
        step.update([g])
    assert step.steps == 2


def test_a_loss_without_a_weight_among_weighed_ones_is_refused():
    """By how much would it count? The window's samples do not say."""
    models, (d, _), step = pair(accumulate=2)

    def both(_, x):
        return sum(each(x).square().mean() for each in models)

    step(both, torch.ones(3, 4))
    with pytest.raises(UsageError, match="give every backward"):
        step.backward(0.1 * models[0].weight.square().sum(), optimizers=[d])
    step(both, torch.ones(3, 4), last=True)
    assert step.steps == 1


def test_a_state_between_two_updates_knows_what_the_first_one_found():
    def begun():
        models, (d, g), step = pair("fp16", skip="each", loss_scale=LossScale(64.0))
        step.backward(loss_of(step, models[0]) * math.inf, optimizers=[d])
        step.update([d], update_scale=False)
        return models, g, step

    (_, straight), g, step = begun()
    _, _, saved = begun()
    (_, model), (_, optimizer), resumed = pair("fp16", skip="each", loss_scale=LossScale(64.0))
    resumed.load_state_dict(saved.state_dict())
    for each, net, mine in ((step, straight, g), (resumed, model, optimizer)):
        each.backward(loss_of(each, net), optimizers=[mine])
        each.update([mine])
    assert float(step.loss_scale.scale) == float(resumed.loss_scale.scale) == 32.0
    assert resumed.history[-1].skipped


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_parameter_of_two_fused_optimizers_is_unscaled_once(precision):
    def trained(fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
            torch.optim.SGD([model.weight], lr=0.1, fused=fused),
        ]
        step = TrainStep(model, optimizers, policy=precision, max_grad_norm=0.5)
        step(lambda m, x: m(x).float().square().mean(), torch.ones(8, 4))
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-6, atol=0)
