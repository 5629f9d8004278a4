"""The chunked loss is the plain one, in every precision, and needs a fraction of its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ampwise.bench.memory import peak_on_cpu
from ampwise.losses import linear_cross_entropy


def case(rows=37, width=12, classes=29, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(classes, generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::7] = -100
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)]
    return leaves, target


def plain(hidden, weight, bias, target, **given):
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **given)


def chunked(hidden, weight, bias, target, rows=5, **given):
    return linear_cross_entropy(hidden, weight, target, bias=bias, chunk_rows=rows, **given)


def gradients(loss, leaves, scale=1.0):
    return torch.autograd.grad(loss * scale, leaves)


@pytest.mark.parametrize("rows", [1, 5, 37, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_and_gradients_in_float64(rows, smoothing, reduction):
    leaves, target = case()
    given = {"label_smoothing": smoothing, "reduction": reduction}
    expected, found = plain(*leaves, target, **given), chunked(*leaves, target, rows, **given)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    for ours, theirs in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


def test_gradcheck():
    (hidden, weight, bias), target = case(rows=9, width=4, classes=5)
    assert torch.autograd.gradcheck(
        lambda h, w, b: chunked(h, w, b, target, 4, label_smoothing=0.2), (hidden, weight, bias)
    )


def test_float32_within_rounding():
    """Sums over 29 classes and 37 rows: some tens of roundings of 6e-8 each."""
    leaves, target = case(dtype=torch.float32)
    expected, found = plain(*leaves, target), chunked(*leaves, target)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_no_further_from_float64_than_the_plain_one(dtype):
    exact_leaves, target = case()
    exact = gradients(plain(*exact_leaves, target), exact_leaves)
    leaves, _ = case(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        results = [plain(*leaves, target), chunked(*leaves, target)]
    errors = []
    for loss in results:
        assert loss.dtype == torch.float32
        found = gradients(loss, leaves)
        errors.append([(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)])
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 1.2 * theirs + 1e-6


def test_small_float16_gradients_survive_under_a_loss_scale():
    """Gradients of 1e-9 are zero in float16 before they are scaled, and not after."""
    leaves, target = case(dtype=torch.float32)
    scale = 2.0**16
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked(*leaves, target) * 1e-6
    found = gradients(loss, leaves, scale)
    exact_leaves, _ = case()
    exact = gradients(plain(*exact_leaves, target) * 1e-6, exact_leaves, scale)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_any_leading_shape_and_only_what_is_asked_for():
    (hidden, weight, _), target = case()
    hidden = hidden.detach()[:36].reshape(4, 9, -1).transpose(0, 1).requires_grad_()
    target = target[:36].reshape(4, 9).transpose(0, 1)
    found = linear_cross_entropy(hidden, weight, target, chunk_rows=7)
    torch.testing.assert_close(found, plain(hidden, weight, None, target))
    assert gradients(found, [hidden])[0].shape == hidden.shape
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), target).requires_grad


def test_no_row_that_counts_is_nan_as_in_torch():
    leaves, target = case()
    ignored = torch.full_like(target, -100)
    assert chunked(*leaves, ignored).isnan()
    assert chunked(*leaves, ignored, reduction="sum") == 0
    assert linear_cross_entropy(torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(0).long()).isnan()


def test_a_second_derivative_is_refused():
    leaves, target = case()
    (first,) = torch.autograd.grad(chunked(*leaves, target) ** 2, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_inside_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    leaves, target = case()
    found = checkpoint(chunked, *leaves, target, use_reentrant=False)
    expected = gradients(plain(*leaves, target), leaves)
    for ours, theirs in zip(gradients(found, leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_memory_is_a_fraction():
    (hidden, weight, bias), target = case(2048, 64, 8192, torch.float32)
    peaks = [
        peak_on_cpu(lambda loss=loss: gradients(loss(), [hidden, weight]))
        for loss in (
            lambda: plain(hidden, weight, bias, target),
            lambda: linear_cross_entropy(hidden, weight, target, bias=bias),
        )
    ]
    assert peaks[0] > 5 * peaks[1], peaks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, r"weight: expected shape \(classes, 4\)"),
        ({"target": torch.zeros(3).long()}, r"target: expected shape \(2,\), got \(3,\)"),
        ({"target": torch.zeros(2)}, "target: expected class indices, got torch.float32"),
        ({"label_smoothing": 2.0}, "label_smoothing: expected 0 to 1"),
        ({"reduction": "none"}, "reduction: expected 'mean' or 'sum', got 'none'"),
        ({"chunk_rows": 0}, "chunk_rows: expected a positive number, got 0"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    given = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "target": torch.zeros(2).long(),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(given | change))


def test_a_target_out_of_range_is_refused():
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(torch.zeros(2, 4), torch.zeros(5, 4), torch.tensor([0, 5]))
