"""Fused attention by its formula, and the operation inside it that broke."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain.causes import explain
from ampwise.numerics.observe.attention import by_formula, inside
from ampwise.numerics.observe.bits import NAN
from ampwise.numerics.observe.roots import Root
from ampwise.places import NOWHERE
from tests.numerics.cases import data, line_of, square, task

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
HALF_MASKED = torch.zeros(8, 8).masked_fill(torch.arange(64).reshape(8, 8) % 3 == 0, -math.inf)
ROW_MASKED = torch.zeros(8, 8).index_fill(0, torch.tensor([3]), -math.inf)


def total(model, batch):
    return model(batch).sum()


def qkv(heads=4, shared=1):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, heads, 8, 16), (2, heads // shared, 8, 16), (2, heads // shared, 8, 16)]
    return [torch.randn(each, generator=generator, dtype=torch.float64) for each in sizes]


@pytest.mark.parametrize(
    ("mask", "causal", "scale"),
    [(None, False, None), (None, True, None), (HALF_MASKED, False, 0.3), (ROW_MASKED, False, None)],
)
def test_formula_gives_what_pytorch_does_in_float64(mask, causal, scale):
    q, k, v = qkv()
    named = {"attn_mask": None if mask is None else mask.double(), "scale": scale}
    out, lse = FUSED(q, k, v, 0.0, causal, **named)
    torch.testing.assert_close(
        by_formula(FUSED, (q, k, v, 0.0, causal), named, torch.float64), [out]
    )
    grad = torch.randn_like(out)
    given = (grad, q, k, v, out, lse, 0.0, causal)
    theirs = list(BACKWARD(*given, **named))
    torch.testing.assert_close(by_formula(BACKWARD, given, named, torch.float64), theirs)


def test_formula_of_heads_that_share_keys_and_values():
    q, k, v = (each.requires_grad_() for each in qkv(heads=4, shared=2))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(by_formula(FUSED, (q, k, v), {}, torch.float64), [out.detach()])
    grad = torch.randn_like(out)
    theirs = list(torch.autograd.grad(out, (q, k, v), grad))
    ours = by_formula(BACKWARD, (grad, q, k, v, None, None, 0.0, False), {}, torch.float64)
    torch.testing.assert_close(ours, theirs)


class HugeScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        h = self.lin(x).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, scale=1e38)  # <- here


class HugeGradient(nn.Module):
    """What comes back fits float32, and its product with the values does not."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        h = self.lin(x).unsqueeze(1)
        h = F.scaled_dot_product_attention(h, h, 1e4 * h)  # <- here
        return torch.sin(2e34 * h.float())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scores_beyond_float32_are_found_inside_attention(precision):
    found = diagnose(task(HugeScale, square, data(2, 6, 16)), precision, steps=2)
    assert (found.status, found.phase, found.cause) == ("fault", "forward", "RANGE_OVERFLOW")
    assert found.origin.line == line_of(HugeScale)
    assert found.origin.inside == "mul"
    assert "float32 ends at" in found.explanation


def test_products_of_backward_are_found_inside_attention():
    found = diagnose(task(HugeGradient, total, data(2, 6, 16)), "bf16", steps=2)
    assert (found.status, found.phase, found.cause) == ("fault", "backward", "RANGE_OVERFLOW")
    assert found.origin.line == line_of(HugeGradient)
    assert found.origin.inside


def test_a_sound_attention_has_nothing_inside():
    q, k, v = (each.half() for each in qkv())
    root = Root(0, FUSED._overloadpacket.__name__, NOWHERE, NAN, func=FUSED, args=(q, k, v))
    assert inside(root) is None


def test_a_kernel_that_gives_nan_for_a_masked_row_is_told_by_its_mask():
    q, k, v = (each.half() for each in qkv())
    root = Root(0, FUSED._overloadpacket.__name__, NOWHERE, NAN, func=FUSED, args=(q, k, v),
                kwargs={"attn_mask": ROW_MASKED.half()}, outputs=[q * math.nan])  # fmt: skip
    assert explain(None, None, root).cause == "FULLY_MASKED_ROW"
