"""``auto`` and ``bf16-pure`` on an accelerator: a race leaves no trace, and rounding is repeatable."""

from __future__ import annotations

import pytest
import torch

from ampwise import TrainStep
from tests.step.helpers import batches, classify, mlp, parameters

pytestmark = pytest.mark.gpu


def trained(policy: str, steps: int = 6) -> tuple[list[float], torch.Tensor, TrainStep]:
    torch.manual_seed(0)
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, policy=policy)
    moved = [tuple(each.cuda() for each in batch) for batch in batches(2) * (steps // 2)]
    losses = [step(classify, batch).item() for batch in moved]
    return losses, parameters(model), step


def test_a_race_leaves_no_trace_on_the_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path))
    losses, weights, step = trained("auto")
    assert step.resolution is not None
    assert "raced on this step" in str(step.resolution)
    told, expected, _ = trained(step.policy.text)
    assert losses == told
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16-pure:rounding=kahan"])
def test_pure_bfloat16_trains_the_same_twice(policy) -> None:
    losses, weights, step = trained(policy, 40)
    assert {each.dtype for each in step.parameters().values()} == {torch.bfloat16}
    assert losses[-1] < losses[0]
    again, expected, _ = trained(policy, 40)
    assert losses == again
    assert torch.equal(weights, expected)


def test_bits_that_are_added_round_to_the_mean_on_the_device() -> None:
    """1 + 2**-10 lies an eighth of the way between two bfloat16 numbers."""
    model = torch.nn.Linear(256, 256, bias=False, device="cuda")
    torch.nn.init.constant_(model.weight, 1.0)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=2.0**-10), policy="bf16-pure")
    step(lambda m, x: m(x).float().sum() * -1.0, torch.ones(1, 256, device="cuda"))
    above = (model.weight == 1 + 2.0**-7).float().mean().item()
    assert {*model.weight.unique().tolist()} == {1.0, 1 + 2.0**-7}
    assert above == pytest.approx(0.125, abs=0.01)
