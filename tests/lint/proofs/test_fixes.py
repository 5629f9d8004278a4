"""Fixes, run: small CPU trainings before and after ``--unsafe-fixes``, and what each one changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ampwise_lint.fix import fix_file
from ampwise_lint.settings import Settings

BEGIN = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(8)]
model = nn.Linear(16, 4).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
"""


@pytest.fixture
def both(tmp_path):
    """Runs a script as it is and as a rule mends it; the names both leave."""

    def run(code: str, script: str, begin: str = BEGIN) -> tuple[dict[str, Any], dict[str, Any]]:
        path = tmp_path / "script.py"
        path.write_text(begin + script)
        before = executed(path.read_text())
        assert fix_file(path, frozenset({path}), Settings(select=(code,)), unsafe=True)
        return before, executed(path.read_text())

    return run


def executed(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast("cuda") says that it is off
        try:
            exec(compile(text, "script", "exec"), names)
        except RuntimeError as error:
            names["raised"] = str(error)
    return names


WINDOW = """\
first = []
for i, (x, y) in enumerate(batches):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if (i + 1) % 4 == 0:
        first.append(model.weight.grad / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


def test_amp109_gives_the_gradient_of_the_mean(both):
    before, after = both("AMP109", WINDOW)
    torch.testing.assert_close(before["first"][0], 4 * after["first"][0])


def test_amp112_leaves_the_schedule_where_the_step_was_skipped(both):
    before, after = both(
        "AMP112",
        """\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for i, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y) * (float("inf") if i < 3 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
""",
    )
    assert before["scheduler"].last_epoch == 8
    assert after["scheduler"].last_epoch == 5


def test_amp115_reports_the_loss_itself(both):
    divided = """\
total = torch.zeros(())
for i, (x, y) in enumerate(batches):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / 4
    scaler.scale(loss).backward()
    total += loss.detach()
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
    before, after = both("AMP115", divided)
    assert after["total"] == pytest.approx(4 * before["total"])
    assert after["model"].weight.equal(before["model"].weight)
    scaled = """\
total = torch.zeros(())
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss = scaler.scale(loss)
    loss.backward()
    total += loss.detach()
    scaler.step(optimizer)
    scaler.update()
"""
    before, after = both("AMP115", scaled)
    assert after["total"] == pytest.approx(before["total"] / 1024)
    assert after["model"].weight.equal(before["model"].weight)


def test_amp203_validates_in_the_precision_of_training(both):
    before, after = both(
        "AMP203",
        """\
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    for x, y in batches:
        output = model(x)
        right = (output.argmax(1) == y).float().mean()
""",
    )
    assert (before["output"].dtype, after["output"].dtype) == (torch.float32, torch.bfloat16)


def test_amp209_is_the_same_loss_and_keeps_what_the_sigmoid_loses(both):
    script = """\
criterion = nn.BCELoss()
losses = []
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)[:, :1] + {shift}
        target = (y < 2).float().unsqueeze(1)
        loss = criterion(torch.sigmoid(logits), target)
    losses.append(loss.detach())
    loss.backward()
    optimizer.step()
"""
    before, after = both("AMP209", script.format(shift=0.0))
    torch.testing.assert_close(torch.stack(before["losses"]), torch.stack(after["losses"]))
    # Where the sigmoid is 1 in float32 already, its loss is 100 wherever the label is 0.
    before, after = both("AMP209", script.format(shift=30.0))
    assert before["losses"][0] > 1.5 * after["losses"][0]


def test_amp211_keeps_zero_out_of_the_denominator(both):
    script = """\
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = model(x * 0) - model.bias.half()
        hidden = hidden / (hidden.abs().amax(dim=-1, keepdim=True) + 1e-8)
        bound = torch.ones_like(model(x)).clamp(max=1 - 1e-4)
        loss = F.cross_entropy(hidden, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    before, after = both("AMP211", script)
    assert before["loss"].isnan()
    assert after["loss"].isfinite()
    assert before["bound"].max() == 1
    assert after["bound"].max() < 1


def test_amp214_brings_backward_into_the_dtypes_of_forward(both):
    before, after = both(
        "AMP214",
        """\
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


weight = torch.randn(16, 4, requires_grad=True)
for x, y in batches:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(Product.apply(x, weight), y)
    loss.backward()
gradient = weight.grad
""",
    )
    assert "same dtype" in before["raised"]
    assert after["gradient"].isfinite().all()


def test_amp218_switches_autocast_on(both):
    before, after = both(
        "AMP218",
        """\
for x, y in batches:
    x, y = x.to("cpu"), y.to("cpu")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(x)
        loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
""",
    )
    assert (before["output"].dtype, after["output"].dtype) == (torch.float32, torch.bfloat16)


def test_amp301_gives_the_same_sum_as_a_number(both):
    before, after = both(
        "AMP301",
        """\
total = 0.0
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.item() * len(x)
""",
    )
    assert isinstance(after["total"], float)
    assert after["total"] == pytest.approx(before["total"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_amp116_a_penalty_of_float32_gradients_is_the_same_in_and_out_of_autocast(dtype):
    """Why only penalties of 16-bit gradients are reported."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def gradient(inside: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            output = (torch.ones(4, 16) @ weight).tanh().sum()
        (first,) = torch.autograd.grad(output * 1024, weight, create_graph=True)
        with torch.autocast("cpu", dtype=dtype, enabled=inside):
            penalty = (first / 1024).pow(2).sum().sqrt()
        return torch.autograd.grad(penalty, weight)[0]

    assert gradient(inside=True).equal(gradient(inside=False))
