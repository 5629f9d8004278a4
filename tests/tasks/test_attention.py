"""Attention by products: the same as PyTorch's kernel, to the rounding of the format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ampwise.bench.arm import Arm, Settings
from ampwise.errors import LeverError
from ampwise.policy import Policy
from ampwise.step.precision import CallMode
from ampwise.tasks import Task, load_task
from ampwise.tasks.attention import by_products, calls_attention
from ampwise.tasks.levers import pulled

TINY = {"size": "tiny", "batch": "2", "context": "16"}


class Kernels(CallMode):
    """Counts calls of the fused kernel."""

    calls = 0

    def call(self, func, args, kwargs):
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **kwargs)


def inputs(dtype=torch.float64, rows=7, columns=7):
    torch.manual_seed(0)
    shapes = [(2, 3, rows, 8), (2, 3, columns, 8), (2, 3, columns, 5)]
    return [torch.randn(each, dtype=dtype).requires_grad_() for each in shapes]


@pytest.mark.parametrize("columns", [7, 4])
@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_it_is_attention_and_so_are_its_gradients(given, columns):
    found, wanted = inputs(columns=columns), inputs(columns=columns)
    out, expected = by_products(*found, **given), F.scaled_dot_product_attention(*wanted, **given)
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    out.backward(seed)
    expected.backward(seed)
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.grad, other.grad)


@pytest.mark.parametrize(("rows", "columns"), [(300, 300), (520, 520), (300, 150), (150, 300)])
def test_long_causal_attention_in_blocks_is_the_same(rows, columns):
    found, wanted = inputs(rows=rows, columns=columns), inputs(rows=rows, columns=columns)
    out = by_products(*found, is_causal=True)
    expected = F.scaled_dot_product_attention(*wanted, is_causal=True)
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    out.backward(seed)
    expected.backward(seed)
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.grad, other.grad)


def test_causal_attention_leaves_out_what_no_query_of_a_block_sees():
    """Two blocks of half the queries: three quarters of the products."""
    q, k, v = (each.detach() for each in inputs(rows=256, columns=256))
    with FlopCounterMode(display=False) as all_of_it:
        by_products(q, k, v)
    with FlopCounterMode(display=False) as causal:
        by_products(q, k, v, is_causal=True)
    assert causal.get_total_flops() == 0.75 * all_of_it.get_total_flops()


def test_it_can_be_differentiated_twice():
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: by_products(q, k, v, is_causal=True), [e[:1, :1, :3] for e in inputs()]
    )


def test_under_autocast_it_is_in_that_format_and_in_an_island_in_float32():
    q, k, v = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low = by_products(q, k, v, is_causal=True)
        with torch.autocast("cpu", enabled=False):
            assert by_products(q, k, v).dtype is torch.float32
    assert low.dtype is torch.bfloat16
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    # Scores, weights and values are each rounded to 8 bits.
    assert ((low.double() - exact).norm() / exact.norm()).item() < 4 * 2**-8


@pytest.mark.parametrize(
    "given",
    [
        {"attn_mask": torch.tensor([True, False]).expand(7, 2).repeat(1, 4)[:, :7]},
        {"attn_mask": torch.zeros(7, 7, dtype=torch.float64)},
        {"dropout_p": 0.5},
    ],
)
def test_masks_and_dropout_are_the_kernel_s(given):
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*inputs(), **given)
    torch.manual_seed(3)
    with Kernels() as kernels:
        assert torch.equal(by_products(*inputs(), **given), expected)
    assert kernels.calls == 1


def helper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class Direct(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Inherited(Direct):
    pass


class InMethod(nn.Module):
    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x):
        return self.attend(x)


class ByHelper(nn.Module):
    def forward(self, x):
        return helper(x, x, x)


@pytest.mark.parametrize("kind", [Direct, Inherited, InMethod, ByHelper])
def test_whose_code_calls_attention(kind):
    assert calls_attention(kind())
    built = pulled(
        Task(model=kind, batches=list, loss=lambda m, x: m(x).sum()), ["unfused-attention"]
    )
    with Kernels() as kernels:
        built.model()(torch.randn(1, 2, 3, 4))
    assert not kernels.calls


def test_modules_of_pytorch_s_do_not_and_the_lever_says_so():
    assert not calls_attention(nn.MultiheadAttention(8, 2))
    made = pulled(
        Task(
            model=lambda: nn.TransformerEncoderLayer(8, 2),
            batches=list,
            loss=lambda m, x: m(x).sum(),
        ),
        ["unfused-attention"],
    )
    with pytest.raises(LeverError, match="no module's own code calls"):
        made.model()


def trained(levers: list[str], policy: str) -> tuple[list[str], list[float]]:
    """Names of the model, and the loss of each step."""
    task = pulled(load_task("charlm", TINY), levers)
    arm = Arm(task, Policy.parse(policy), Settings(torch.device("cpu")))
    batches = iter(task.batches())
    with Kernels() as kernels:
        for _ in range(4):
            arm.run(next(batches))
    assert bool(kernels.calls) == ("unfused-attention" not in levers)
    return list(arm.model.state_dict()), [each.loss for each in arm.step.poll()]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "bf16:islands=blocks.0"])
@pytest.mark.parametrize("others", [[], ["checkpointing"]])
def test_a_model_trains_the_same_with_it(policy, others):
    """Also where forward runs again in backward."""
    names, losses = trained(others, policy)
    same_names, same_losses = trained(["unfused-attention", *others], policy)
    assert same_names == names
    assert same_losses == pytest.approx(losses, rel=1e-5 if policy == "fp32" else 2e-3)
    assert len(losses) == 4
