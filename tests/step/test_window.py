"""Invariant 2: accumulated gradients are those of the whole window, checked against FP64."""

from __future__ import annotations

import copy

import pytest
import torch

from ampwise.errors import UsageError
from ampwise.step import TrainStep

from .helpers import batches, classify, mlp


def fp64_gradients(model, pieces) -> torch.Tensor:
    """Gradient of the mean loss over all samples of a window, in float64."""
    reference = copy.deepcopy(model).double()
    x = torch.cat([piece[0] for piece in pieces]).double()
    y = torch.cat([piece[1] for piece in pieces])
    classify(reference, (x, y)).backward()
    return torch.cat([each.grad.flatten() for each in reference.parameters()])


def recorded_gradients(model, pieces, accumulate, precision="fp32", **settings) -> torch.Tensor:
    """What SGD with lr 1 subtracted."""
    before = [each.detach().double().clone() for each in model.parameters()]
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        policy=precision,
        accumulate=accumulate,
        **settings,
    )
    for piece in pieces:
        step(classify, piece)
    step.flush()
    assert step.boundary
    assert step.steps == 1
    moved = zip(before, model.parameters(), strict=True)
    return torch.cat([(old - new.detach().double()).flatten() for old, new in moved])


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [8, 3, 5, 1], [2, 9], [7]])
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_uneven_and_short_windows_give_the_gradient_of_the_whole_window(precision, error, sizes):
    """The bound is the format's eps, with room for a dozen roundings."""
    pieces = [batches(1, size, seed=size)[0] for size in sizes]
    model = mlp()
    expected = fp64_gradients(model, pieces)
    seen = recorded_gradients(model, pieces, 4, precision)
    assert (seen - expected).norm() <= error * expected.norm()


def test_token_weights_as_device_tensors():
    """Only labelled positions count; the weight never leaves the device."""
    pieces = batches(3, 8)
    for index, (_, labels) in enumerate(pieces):
        labels[: 2 * index + 1] = -100  # cross_entropy ignores these
    expected = fp64_gradients(mlp(), pieces)
    seen = recorded_gradients(mlp(), pieces, 4, samples=lambda batch: (batch[1] >= 0).sum())
    assert (seen - expected).norm() <= 1e-6 * expected.norm()


def test_loss_scale_is_constant_inside_a_window():
    step = TrainStep(
        model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), policy="fp16", accumulate=3
    )
    scales, data = [], batches(9)
    data[4] = (data[4][0] * 1e6, data[4][1])  # overflows in the middle of the second window
    for batch in data:
        scales.append(step.loss_scale.value)
        step(classify, batch)
    assert scales == [2.0**16] * 6 + [2.0**15] * 3
    assert [record.skipped for record in step.history] == [False, True, False]


def test_recorded_loss_is_the_weighted_mean_of_the_window():
    step = TrainStep(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.0), accumulate=2)
    first, second = batches(1, 6, seed=3)[0], batches(1, 2, seed=4)[0]
    a, b = step(classify, first), step(classify, second)
    assert step.history[0].loss == pytest.approx((6 * a.item() + 2 * b.item()) / 8, rel=1e-6)


def test_boundary_and_position():
    step = TrainStep(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    seen = []
    for batch in batches(3):
        step(classify, batch)
        seen.append((step.boundary, step.position, step.steps))
    step.flush()
    assert seen == [(False, 1, 0), (True, 0, 1), (False, 1, 1)]
    assert (step.boundary, step.position, step.steps) == (True, 0, 2)


def test_last_closes_a_window_early():
    step = TrainStep(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4)
    step(classify, batches(1)[0], last=True)
    assert step.boundary


def test_update_without_backward_is_refused():
    step = TrainStep(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="without a backward"):
        step.update()
