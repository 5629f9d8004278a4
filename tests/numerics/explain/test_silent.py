"""What a wrong loss or gradient without NaN means, and what it does not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain import spread
from ampwise.numerics.observe.shadow import shadow
from ampwise.numerics.result import percent
from ampwise.report.diagnosis import render, to_html
from ampwise.step import TrainStep
from ampwise.step.replay import Replay
from ampwise.tasks import Task
from ampwise_lint.base.console import Console
from tests.numerics.cases import (
    CASES,
    LOOK_ALIKES,
    VARIANTS,
    BranchAndOverflow,
    ChannelNorm,
    apart,
    data,
    fourth,
    line_of,
    task,
)


def regression() -> Task:
    x, truth = data(64, 8), data(8, 1, seed=1)
    return Task(
        model=lambda: nn.Linear(8, 1),
        batches=lambda: [(x, x @ truth)],
        loss=lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 5e-2),
        name="regression",
    )


def test_training_that_has_converged_is_no_fault_of_the_precision():
    torch.manual_seed(0)
    found = diagnose(regression(), "bf16", steps=400)
    assert (found.status, found.findings) == ("clean", []), found.explanation
    assert any("converged to the floor of bfloat16" in note for note in found.notes)
    torch.manual_seed(0)
    early = diagnose(regression(), "bf16", steps=10)
    assert not any("floor" in note for note in early.notes)


@pytest.mark.parametrize(
    ("loss", "terms"),
    [
        (lambda out: out.mean(), 2.0),
        (lambda out: -3 * out.sum() / 2, 12.0),
        (lambda out: out[:2].mean() - out[2:].mean(), 4.0),
        (lambda out: 1.5 - out.mean(), 3.5),
        (lambda out: out.square().mean(), 5.0),
    ],
)
def test_the_terms_of_a_loss_are_what_it_is_the_sum_of(loss, terms):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    step = Replay(TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32"))
    batch = torch.tensor([[1.0], [-3.0], [3.0], [-1.0]])

    def again(step: TrainStep, batch: torch.Tensor) -> None:
        step.micro_batch(lambda model, batch: loss(model(batch)), batch)

    run = shadow(step, step.rehearsal(again, [batch]))
    assert run.terms == pytest.approx([terms])


def test_a_fix_that_leaves_a_matrix_on_noise_is_not_verified():
    torch.manual_seed(0)
    found = diagnose(task(BranchAndOverflow, fourth, data(64, 8)), "fp16", steps=3)
    assert found.cause == "RANGE_OVERFLOW"
    assert found.origin is not None
    assert found.origin.line == line_of(BranchAndOverflow)
    line = next(each for each in found.fixes if each.what.startswith("line"))
    assert not line.verified
    assert "a fault is left: the gradient of branch.weight is noise" in line.cost


def test_where_float32_fails_too_it_is_said_and_not_offered():
    torch.manual_seed(0)
    found = diagnose(VARIANTS["variance becomes zero in float32"].make(), "fp32", steps=2)
    assert [each.what for each in found.fixes] == [
        f"the function around line {line_of(ChannelNorm)} in float64"
    ]
    assert any("float32 itself fails on this step" in note for note in found.notes)


def test_what_is_wrong_in_any_precision_is_not_sent_to_tune():
    for name in ("loss stays NaN", "bad data", "log of zero in the data"):
        torch.manual_seed(0)
        found = diagnose((CASES | VARIANTS)[name].make(), "fp16", steps=2)
        assert found.notes == []
        assert not any("bfloat16" in each.what for each in found.fixes)
    assert found.explanation.startswith(
        "batch holds -inf before the model sees it, and convolution"
    )


def masked_then_mixed(model, batch):
    hidden = model(batch).float().masked_fill(torch.eye(8).bool(), float("-inf"))
    return F.linear(hidden, torch.tensor([[1.0, -1.0] * 4])).sum()


def test_a_domain_error_shows_the_argument_that_is_not_finite():
    torch.manual_seed(0)
    found = diagnose(task(lambda: nn.Linear(8, 8), masked_then_mixed, data(8, 8)), "bf16", steps=2)
    assert found.cause == "DOMAIN_ERROR"
    assert "(from -inf to " in found.explanation


def test_a_share_that_is_not_nothing_is_not_shown_as_nothing(capsys):
    shares = (0.0, 1e-6, 0.004, 0.006, 0.5, 0.994, 0.999999, 1.0)
    assert [percent(each) for each in shares] == [
        "0%", "<1%", "<1%", "1%", "50%", "99%", ">99%", "100%"
    ]  # fmt: skip
    assert (percent(1e-4, 1), percent(0.001, 1), percent(0.0, 1)) == ("<0.1%", "0.1%", "0.0%")
    found = diagnose(VARIANTS["gain"].make(), "fp16", steps=1)
    assert found.origin is not None
    found.origin.inputs[0] = dataclasses.replace(found.origin.inputs[0], non_finite=1 / 32768)
    render(found, Console(width=200))
    assert "<1%" in capsys.readouterr().out
    assert "&lt;0.1%" in to_html(found)


@pytest.mark.parametrize("make", [LOOK_ALIKES["causal mask"], VARIANTS["gain"].make])
def test_the_snippet_of_the_docs_runs_on_sound_and_on_broken_tasks(make, capsys):
    text = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text()
    snippet = text.partition("```python\n")[2].partition("```")[0]
    torch.manual_seed(0)
    exec(snippet, {"task": make()})
    said = capsys.readouterr().out
    assert said.startswith(("clean None", "fault RANGE_OVERFLOW"))


# -- a moderate loss -------------------------------------------------------------------------------


class Decay(nn.Module):
    """Sums of a segment as the difference of two sums from the beginning, as in Mamba-2."""

    def __init__(self, width=16):
        super().__init__()
        self.rate = nn.Linear(width, 1).requires_grad_(False)  # its gradient would be noise
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        rate = nn.functional.softplus(self.rate(x) + 2).squeeze(-1)
        total = torch.cumsum(self.summed(rate), -1)  # <- here
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        spans = (total[:, None] - total[..., None]).masked_fill(~past, float("-inf"))
        return x + self.out(torch.exp(spans) @ self.value(x))

    def summed(self, rate):
        return rate


class Wide(Decay):
    def summed(self, rate):
        return rate.float()


def _of(model):
    torch.manual_seed(0)
    return diagnose(task(model, apart, data(2, 300, 16)), "bf16", steps=2)


def _said(model):
    found = _of(model)
    assert found.status == "clean"
    return [each for each in found.notes if "line" in each]


def test_a_line_that_makes_all_of_the_error_is_a_fault():
    found = _of(Decay)
    assert (found.status, found.cause) == ("fault", "PRECISION_LOSS")
    assert found.origin.line == line_of(Decay)


def test_a_line_that_makes_the_gradient_worse_is_noted_with_what_helps(monkeypatch):
    monkeypatch.setattr(spread, "_ALL_OF_IT_DB", 1000.0)
    (note,) = _said(Decay)
    line = line_of(Decay)
    assert re.search(
        rf"made by rounding on line {line} \(cumsum in bfloat16, (>99|100|9\d)%\): the gradient has an "
        rf"SQNR of \d+ dB against float64\. With line {line} in float32, tried on this step, the "
        r"gradient has [45]\d dB\.",
        note,
    ), note


def test_nothing_is_noted_of_the_same_sums_in_float32():
    assert _said(Wide) == []


def test_nothing_is_noted_that_float32_does_not_make_better(monkeypatch):
    monkeypatch.setattr(spread, "_GAINED_DB", 200.0)
    monkeypatch.setattr(spread, "_ALL_OF_IT_DB", 1000.0)
    assert _said(Decay) == []


def offset(model, batch):
    x, level = batch
    return ((model(x) + level) - level - 0.5).float().square().mean()  # <- here


def sometimes(levels) -> Task:
    return Task(
        model=lambda: nn.Linear(8, 8),
        batches=lambda: [(data(8, 8), torch.tensor(each)) for each in levels],
        loss=offset,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-3),
    )


def test_a_fault_that_the_last_step_does_not_have_is_found_on_the_way():
    # A number on its own does not widen what it is added to.
    torch.manual_seed(0)
    most, once = [0.0, 0.0, *[4096.0] * 5, 0.0], [0.0] * 4 + [4096.0] + [0.0] * 3
    found = diagnose(sometimes(most), "bf16", steps=8)
    assert found.status == "fault"
    assert found.origin is not None
    assert (found.step, found.origin.line) == (5, line_of(offset))
    compared = "Compared with float64 were steps 3 and 5; the others were not looked at."
    assert compared in found.notes
    for levels in (once, [0.0] * 8):
        sound = diagnose(sometimes(levels), "bf16", steps=8)
        assert (sound.status, sound.step) == ("clean", 8)


class Shy(nn.Module):
    """Runs only where nobody looks."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise ValueError("somebody looks")
        return self.lin(x)


def test_a_step_that_cannot_be_compared_says_so():
    torch.manual_seed(0)
    found = diagnose(task(Shy, apart, data(4, 8)), "bf16", steps=2)
    assert found.status == "clean"
    said = "The step was not compared with float64: ValueError: somebody looks"
    assert any(each.startswith(said) for each in found.notes), found.notes
    assert not any("SQNR" in each for each in found.notes)


class Quantiles(nn.Module):
    """0.998 is 1 in bfloat16, and what lies below that quantile costs nothing."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 3))

    def forward(self, x):
        return self.net(x)

    def levels(self, predicted):
        return predicted.new_tensor([0.5, 0.99, 0.998])  # <- here


class WideQuantiles(Quantiles):
    def levels(self, predicted):
        return torch.tensor([0.5, 0.99, 0.998])


def pinball(model, batch):
    predicted = model(batch)
    level = model.levels(predicted)
    miss = batch.sum(1, keepdim=True).to(predicted.dtype) * 0.3 - predicted
    return torch.where(miss > 0, level * miss, (level - 1) * miss).float().mean()


@pytest.mark.parametrize(("model", "status"), [(Quantiles, "fault"), (WideQuantiles, "clean")])
def test_a_number_whose_rounding_makes_a_loss_wrong_is_a_fault(model, status):
    torch.manual_seed(0)
    made = Task(
        model=model,
        batches=lambda: [data(256, 12)] * 12,
        loss=pinball,
        optimizer=lambda m: torch.optim.Adam(m.parameters(), 3e-2),
    )
    found = diagnose(made, "bf16", steps=12)
    assert found.status == status, (found.notes, found.explanation)
    if status == "fault":
        assert found.origin.line == line_of(Quantiles)
