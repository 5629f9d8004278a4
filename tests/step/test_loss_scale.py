"""The loss scale against GradScaler's own trajectory, its bounds, and its state."""

from __future__ import annotations

import random

import pytest
import torch

from ampwise.errors import UsageError
from ampwise.step import LossScale

ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def grad_scaler(**settings: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))  # creates its state
    return scaler


def update_grad_scaler(scaler: torch.amp.GradScaler, found_inf: torch.Tensor) -> float:
    """GradScaler's own `update` after an optimizer reported `found_inf`."""
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): found_inf}
    scaler.update()
    return scaler.get_scale()


def test_trajectory_is_that_of_gradscaler_over_10_000_random_patterns():
    draw = random.Random(0)
    for _ in range(10_000):
        settings = {
            "init_scale": 2.0 ** draw.randint(4, 16),
            "growth_factor": draw.choice([2.0, 1.5, 4.0]),
            "backoff_factor": draw.choice([0.5, 0.25, 0.9]),
            "growth_interval": draw.randint(1, 5),
        }
        theirs, ours = grad_scaler(**settings), LossScale(**settings, floor=1e-30, ceiling=1e30)
        chance = draw.random()
        for _ in range(draw.randint(1, 16)):
            found_inf = ONE if draw.random() < chance else ZERO
            ours.update(found_inf)
            assert ours.value == update_grad_scaler(theirs, found_inf)


def test_scale_never_leaves_floor_and_ceiling():
    scale = LossScale(growth_interval=1)
    for _ in range(200):
        scale.update(ONE)
    assert scale.value == 2.0**-14  # GradScaler is at exactly 0 after 166 such steps
    for _ in range(200):
        scale.update(ZERO)
    assert scale.value == 2.0**24


def test_hysteresis_is_megatrons_rule():
    scale = LossScale(8.0, growth_interval=3, hysteresis=2)
    pattern = [ONE, ONE, ONE, ZERO, ZERO, ZERO, ONE, ONE]
    expected = [8, 4, 2, 2, 2, 4, 4, 2]  # by hand: patience is used up once, restored by growth
    for found_inf, value in zip(pattern, expected, strict=True):
        scale.update(found_inf)
        assert scale.value == value


def test_state_goes_to_gradscaler_and_back():
    ours = LossScale(2.0**10, growth_interval=7)
    for found_inf in (ZERO, ZERO, ONE, ZERO, ZERO, ZERO):
        ours.update(found_inf)
    theirs = grad_scaler()
    theirs.load_state_dict(ours.state_dict())
    again = LossScale()
    again.load_state_dict(theirs.state_dict())
    for found_inf in (ZERO, ZERO, ZERO, ZERO, ZERO, ONE, ZERO):  # across the growth boundary
        ours.update(found_inf)
        again.update(found_inf)
        assert ours.value == again.value == update_grad_scaler(theirs, found_inf)


def test_a_scale_beyond_the_bounds_is_taken_as_it_is():
    theirs = grad_scaler(init_scale=2.0**40)
    ours = LossScale()
    ours.load_state_dict(theirs.state_dict())
    ours.update(ZERO)
    assert ours.value == 2.0**40


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1"),
        ({"hysteresis": 0}, "hysteresis must be at least 1"),
        ({"floor": 0.0}, "floor must be above 0"),
        ({"ceiling": 1.0}, "ceiling must be at least init_scale"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        LossScale(**settings)


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(UsageError, match="state lacks"):
        LossScale().load_state_dict(state)
