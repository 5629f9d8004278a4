"""Which lines make the error of a gradient: what each does alone adds up to all of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.observe import budget
from ampwise.numerics.observe.budget import carriers
from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.step import TrainStep
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay
from tests.numerics.cases import data, line_of


class Two(nn.Module):
    """Two lines that round, one ten times as coarsely as the other."""

    def __init__(self, coarse: float = 100.0) -> None:
        super().__init__()
        self.coarse = coarse
        self.first = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        h = self.first(x).float()
        h = torch.tanh((h + 10).bfloat16().float() - 10)
        h = torch.tanh((h + self.coarse).bfloat16().float() - self.coarse)  # <- here
        return self.out(h.float())


class Chosen(nn.Module):
    """A choice that is made on rounded numbers; of these nothing else is made."""

    def __init__(self, _: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.codes = nn.Parameter(torch.linspace(-1, 1, 16).repeat(16, 1).t().contiguous())

    def forward(self, x):
        h = torch.tanh(self.first(x).float())
        with torch.no_grad():
            far = (torch.cdist(h, self.codes) + 1000).bfloat16()  # <- here
            nearest = far.argmin(-1)
        return (h * self.codes[nearest]).sum(-1, keepdim=True)


def looked_at(model: nn.Module) -> tuple[Replay, Stash, ShadowRun]:
    step = Replay(TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16"))

    def again(step: TrainStep, batch: torch.Tensor) -> None:
        step.micro_batch(lambda model, batch: F.mse_loss(model(batch), batch[:, :1]), batch)

    stash = step.rehearsal(again, [data(64, 16)])
    return step, stash, shadow(step, stash)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_what_lines_do_alone_adds_up_and_the_worst_comes_first():
    step, stash, run = looked_at(Two())
    found = carriers(step, stash, run, list(run.gradients))
    assert found[0].place.line == line_of(Two)
    assert found[0].share == pytest.approx(1.0, abs=0.1)
    assert sum(each.share for each in found) == pytest.approx(1.0, abs=0.15)


def test_lines_that_do_as_much_are_both_found():
    step, stash, run = looked_at(Two(coarse=10.0))
    lines = {each.place.line for each in carriers(step, stash, run, list(run.gradients))}
    assert {line_of(Two) - 1, line_of(Two)} <= lines


def test_one_gradient_may_be_asked_for():
    step, stash, run = looked_at(Two())
    (found,) = carriers(step, stash, run, ["out.weight"])[:1]
    assert found.place.line == line_of(Two)


def test_a_shadow_decides_by_itself_if_told_to():
    step, stash, run = looked_at(Chosen())
    assert not run.decided  # of 16 codes within 2, at a spacing of 4
    follows = GradientErrors(run.replayed.gradients, run.gradients)
    alone = shadow(step, stash, errors=False, decides=True)
    decides = GradientErrors(run.replayed.gradients, alone.gradients)
    assert follows.sqnr_db > 25
    assert decides.sqnr_db < 10
    truth = Chosen().double()
    truth.load_state_dict({k: v.double() for k, v in step.models[0].state_dict().items()})
    batch = stash.micro_batches[0].batch.double()
    with torch.no_grad():
        nearest = torch.cdist(torch.tanh(truth.first(batch)), truth.codes).argmin(-1)
    h = torch.tanh(truth.first(batch))
    made = (h * truth.codes[nearest]).sum(-1, keepdim=True)
    F.mse_loss(made, batch[:, :1]).backward()
    torch.testing.assert_close(alone.gradients["codes"], truth.codes.grad)


def test_the_line_that_spoils_a_decision_is_found():
    step, stash, run = looked_at(Chosen())
    wanted = shadow(step, stash, errors=False, decides=True)
    run.gradients = wanted.gradients
    found = carriers(step, stash, run, list(run.gradients))
    assert found[0].place.line == line_of(Chosen)


def test_it_takes_no_more_than_its_time(monkeypatch):
    step, stash, run = looked_at(Two())
    monkeypatch.setattr(budget, "_MOST_S", -1.0)
    assert carriers(step, stash, run, list(run.gradients)) == []
