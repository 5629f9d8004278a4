"""Errors that no single operation makes: which lines, and whether float32 there mends them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain import spread
from ampwise.tasks import Task
from tests.numerics.cases import data, line_of


class Averaged(nn.Module):
    """A slow average over time, one rounding a step, beside what is left of the signal."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        h = self.mix(x) + 4
        state = self.begun(h[:, 0])
        found = []
        for t in range(h.shape[1]):
            state = 0.998 * state + 0.002 * h[:, t]  # <- here
            found.append(h[:, t] - state)
        return self.head(torch.stack(found, 1)).mean(1)

    def begun(self, h):
        return h


class AveragedWide(Averaged):
    def begun(self, h):
        return h.float()


class Quantized(nn.Module):
    """The nearest code, by distances in which a common offset takes all digits."""

    def __init__(self, offset: float = 24.0) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.randn(32, 8) * 0.5 + offset)
        self.decoder = nn.Linear(8, 8)
        self.offset = offset

    def forward(self, x):
        z = self.encoder(x).float() + self.offset
        norms = (z**2).sum(1, keepdim=True) + (self.codes**2).sum(1)
        far = norms - 2 * z @ self.codes.t()  # <- here
        nearest = self.codes[far.argmin(1)]
        return self.decoder(z + (nearest - z).detach() - self.offset), nearest, z.detach()


class Centred(Quantized):
    def __init__(self) -> None:
        super().__init__(offset=0.0)


def averaged(model, batch):
    return F.mse_loss(model(batch).float(), batch[:, -1, :1])


def quantized(model, batch):
    made, nearest, z = model(batch)
    return F.mse_loss(made.float(), batch) + F.mse_loss(nearest.float(), z.float())


def trained(model, loss, batch) -> Task:
    return Task(
        model=model,
        batches=lambda: [batch] * 4,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
        name="spread",
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_roundings_of_one_line_that_add_up_are_a_fault_of_that_line():
    found = diagnose(trained(Averaged, averaged, data(32, 64, 8)), "bf16-pure", steps=3)
    assert (found.status, found.cause) == ("fault", "PRECISION_LOSS"), found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(Averaged)


def test_the_same_average_in_float32_is_none():
    found = diagnose(trained(AveragedWide, averaged, data(32, 64, 8)), "bf16-pure", steps=3)
    assert (found.status, found.findings) == ("clean", []), found.explanation


def test_choices_made_on_rounded_numbers_are_a_fault_of_what_rounds_them():
    found = diagnose(trained(Quantized, quantized, data(256, 8)), "bf16", steps=3)
    assert found.status == "fault", found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(Quantized)


def test_the_same_choice_where_the_numbers_hold_is_none():
    found = diagnose(trained(Centred, quantized, data(256, 8)), "bf16", steps=3)
    assert (found.status, found.findings) == ("clean", []), found.explanation


def test_an_error_that_float32_on_no_line_mends_is_no_fault(monkeypatch):
    monkeypatch.setattr(spread, "_MENDED_DB", 200.0)
    monkeypatch.setattr(spread, "_GAINED_DB", 200.0)
    found = diagnose(trained(Averaged, averaged, data(32, 64, 8)), "bf16-pure", steps=3)
    assert (found.status, found.findings) == ("clean", []), found.explanation
