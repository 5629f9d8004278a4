"""The one-pass norm: right against FP64, and finite exactly when every gradient is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampwise.step import gradients as grads

CPU = torch.device("cpu")


def optimizer_with(*gradients: torch.Tensor) -> torch.optim.Optimizer:
    held = [nn.Parameter(torch.zeros_like(each.to_dense())) for each in gradients]
    for parameter, gradient in zip(held, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD(held, lr=0.1)


def norm_of(*gradients: torch.Tensor) -> torch.Tensor:
    return grads.norm(grads.gradients_of([optimizer_with(*gradients)]), CPU)


@pytest.mark.parametrize("sizes", [[5], [100_000], [3, 20_000, 7, 50_000]])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_norm_against_float64(sizes, scale):
    pieces = [torch.randn(size) * scale for size in sizes]
    expected = torch.cat(pieces).double().norm()
    assert norm_of(*pieces).double().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_anywhere_makes_the_norm_non_finite(bad, size):
    for place in (0, size // 2, size - 1):
        gradient = torch.randn(size)
        gradient[place] = bad
        assert not norm_of(torch.randn(30), gradient).isfinite()


@pytest.mark.parametrize("size", [10, 100_000])
def test_finite_gradients_whose_squares_overflow_stay_finite(size):
    """Trap 8: 1e30 is finite, its square is not."""
    gradients = [torch.full((size,), 1e30), torch.ones(3)]
    assert norm_of(*gradients).isinf()  # asks for a second look
    value = grads.wide_norm(gradients, torch.device("cpu"))
    assert value.item() == pytest.approx(1e30 * size**0.5, rel=1e-5)


def test_the_accelerator_recipe_gives_the_same_as_the_cpu_recipe():
    pieces = [torch.randn(50_000), torch.randn(20, 30), torch.full((4,), 1e15)]
    on_cpu = grads.norms(pieces)
    in_float64 = grads.norms_in_float64(pieces)
    assert torch.cat(on_cpu).double().norm().item() == pytest.approx(
        torch.cat(in_float64).norm().item(), rel=1e-5
    )


def test_uncoalesced_sparse_gradients_count_each_element_once():
    indices = torch.tensor([[1, 1, 3]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 1.0, 3.0]), (5,))
    assert norm_of(sparse).item() == 5.0  # (3 + 1, 3), not (3, 1, 3)


def test_complex_16_bit_empty_and_strided_gradients():
    assert norm_of(torch.tensor([3 + 4j])).item() == 5.0
    assert norm_of(torch.full((4096,), 1.0, dtype=torch.bfloat16)).item() == 64.0
    assert norm_of(torch.zeros(0), torch.tensor([2.0])).item() == 2.0
    assert norm_of(torch.ones(200, 200).t()).item() == pytest.approx(200.0)
    assert norm_of(torch.ones(300, 300)[:, ::2]).item() == pytest.approx(45_000**0.5)
    assert norm_of(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)).item() == 5.0


def test_no_gradient_at_all_is_a_norm_of_zero():
    assert grads.norm([], CPU).item() == 0.0


def test_a_parameter_held_by_two_optimizers_counts_once():
    shared = nn.Parameter(torch.zeros(2))
    shared.grad = torch.tensor([3.0, 4.0])
    both = [torch.optim.SGD([shared], lr=0.1) for _ in range(2)]
    assert grads.norm(grads.gradients_of(both), CPU).item() == 5.0
