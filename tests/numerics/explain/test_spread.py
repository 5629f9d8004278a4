"""Errors that no single operation makes: which lines, and whether float32 there mends them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain import spread
from ampwise.places import Place
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


class Routed(nn.Module):
    """Each row goes to the expert of the nearest code: what the others get has other rows."""

    def __init__(self, offset: float = 24.0) -> None:
        super().__init__()
        self.offset = offset
        self.codes = nn.Parameter(torch.randn(4, 8) * 0.5 + offset)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in self.codes)

    def forward(self, x):
        z = x + self.offset
        norms = (z**2).sum(1, keepdim=True) + (self.codes**2).sum(1)
        far = norms - 2 * z @ self.codes.t()  # <- here
        chosen = far.argmin(1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            made[mine] = expert(x[mine]).float()
        return made


class RoutedCentred(Routed):
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


def routed(model, batch):
    return F.mse_loss(model(batch), batch * 3)


def test_choices_of_rows_are_a_fault_of_what_rounds_them():
    found = diagnose(trained(Routed, routed, data(256, 8)), "bf16", steps=3)
    assert found.status == "fault", found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(Routed)


def test_the_same_choice_of_rows_where_the_numbers_hold_is_none():
    found = diagnose(trained(RoutedCentred, routed, data(256, 8)), "bf16", steps=3)
    assert (found.status, found.findings) == ("clean", []), found.explanation


def test_an_error_that_float32_on_no_line_mends_is_no_fault(monkeypatch):
    monkeypatch.setattr(spread, "_MENDED_DB", 200.0)
    monkeypatch.setattr(spread, "_GAINED_DB", 200.0)
    found = diagnose(trained(Averaged, averaged, data(32, 64, 8)), "bf16-pure", steps=3)
    assert (found.status, found.findings) == ("clean", []), found.explanation


class Biased(nn.Module):
    """Scores with a bias that grows with the position: a product, and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).reshape(3, 4 * b, t, 8)
        slopes = 2.0 ** -(torch.arange(4) / 2)
        bias = (slopes[:, None, None] * torch.arange(t)).repeat(b, 1, 1).expand(-1, t, -1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.35)  # <- here
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = (weights.to(v.dtype) @ v).view(b, 4, t, 8)
        return self.out(mixed.transpose(1, 2).reshape(b, t, w))


def test_a_product_that_is_no_layer_counts_as_a_formula():
    batch = 6 * data(4, 200, 32)
    loss = lambda m, b: F.mse_loss(m(b).float(), b.flip(-1))  # noqa: E731
    found = diagnose(trained(Biased, loss, batch), "bf16", steps=4)
    assert found.status == "fault", found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(Biased)


class Waves(nn.Module):
    """A layer whose coordinates are multiplied until its last digits count."""

    def __init__(self) -> None:
        super().__init__()
        self.warp = nn.Linear(2, 2)
        self.net = nn.Sequential(nn.Linear(28, 48), nn.ReLU(), nn.Linear(48, 3))

    def forward(self, xy):
        place = torch.sigmoid(self.warp(xy))  # <- here
        rates = 3.14 * 2 ** torch.arange(7, dtype=place.dtype)
        phase = (place[:, :, None] * rates).flatten(1)
        return self.net(torch.cat((phase.sin(), phase.cos()), dim=-1))


def test_a_formula_on_another_line_that_makes_as_much_makes_it_a_fault():
    xy = torch.rand(256, 2, generator=torch.Generator().manual_seed(0))
    loss = lambda m, b: F.mse_loss(m(b).float(), b[:, :1].expand(-1, 3))  # noqa: E731
    found = diagnose(trained(Waves, loss, xy), "bf16", steps=4)
    assert found.status == "fault", found.notes
    assert found.origin is not None
    assert found.origin.line == line_of(Waves)


def test_a_line_of_another_file_is_told_with_that():
    worst = SimpleNamespace(name="add", dtype=torch.float16)
    here, other = (
        SimpleNamespace(place=Place("forward", "", 0, file, 7), share=0.4, worst=worst, alone=True)
        for file in ("/a/model.py", "/a/losses.py")
    )
    words = spread._lines([here, other])
    assert "line 7 (add in float16, 40%) and line 7 of losses.py (add in float16" in words
