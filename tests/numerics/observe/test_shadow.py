"""The shadow is what float64 would give; errors and their names mean what they say."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.bench.arm import Arm, Settings
from ampwise.numerics.observe.bits import NAN, NEGATIVE, POSITIVE, bad_bits
from ampwise.numerics.observe.gradient_errors import GradientErrors, in_words
from ampwise.numerics.observe.shadow import Rounds, shadow
from ampwise.numerics.observe.trace import watch
from ampwise.policy import Policy
from ampwise.sqnr import compare
from ampwise.step import TrainStep
from ampwise.step.replay import Replay
from ampwise.tasks import load_task
from tests.numerics.cases import data


class Mixed(nn.Module):
    """Views, in-place writes, convolution, normalisation, attention, a saved output."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.norm(self.conv(x.unsqueeze(1))))
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
        h = h.squeeze(1).mean(1)
        room = torch.zeros_like(h)
        room[:, :4] = h[:, 4:]
        room.mul_(2).add_(h)
        return self.out(room.exp().log1p())


def target_loss(model, batch):
    return F.cross_entropy(model(batch).float(), torch.arange(len(batch)) % 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shadow_gradients_are_those_of_a_float64_model(precision):
    torch.manual_seed(0)
    model, batch = Mixed(), data(6, 8)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=precision)
    again = Replay(step)
    run = shadow(again, again.rehearsal(lambda step, x: step.micro_batch(target_loss, x), [batch]))
    exact = copy.deepcopy(model).double()
    # Parameters and batch are what they are; only the computation is in float64. The scale is the
    # step's own, so that gradients are comparable.
    out = exact(batch.double())
    loss = F.cross_entropy(out, torch.arange(6) % 3)
    (loss * float(step.loss_scale.scale)).backward()
    assert float(run.losses[0]) == pytest.approx(float(loss), rel=1e-12)
    for name, parameter in exact.named_parameters():
        wanted = parameter.grad
        noise = (run.gradients[name] - wanted).norm()
        assert noise <= 1e-9 * max(wanted.norm(), 1e-6 * float(step.loss_scale.scale)), name


def test_a_batch_may_repeat_one_value_in_memory():
    torch.manual_seed(0)
    model, mask = nn.Linear(8, 8), torch.tensor([[1.0], [3.0]]).expand(2, 8)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")

    def loss(model, batch):
        return (model(batch[0]) * batch[1]).square().mean()

    again, batch = Replay(step), (data(2, 8), mask)
    run = shadow(again, again.rehearsal(lambda step, x: step.micro_batch(loss, x), [batch]))
    exact = loss(copy.deepcopy(model).double(), [each.double() for each in batch])
    assert float(run.losses[0]) == pytest.approx(float(exact.detach()), rel=1e-12)


def test_watching_and_shadowing_leave_the_replay_as_it_is():
    task = load_task("charlm", {"size": "tiny"})
    arm = Arm(task, Policy.parse("bf16"), Settings(torch.device("cpu")))
    step = Replay(arm.step)
    stash = step.rehearsal(arm.iteration.again, [next(iter(task.batches()))])
    plain = step.replay(stash)
    for other in (watch(step, stash).replayed, shadow(step, stash).replayed):
        assert torch.equal(plain.losses[0], other.losses[0])
        assert all(torch.equal(plain.gradients[n], other.gradients[n]) for n in plain.gradients)


def test_errors_are_measured_as_they_are_defined():
    exact = torch.tensor([3.0, -4.0, 1e-9], dtype=torch.float64)
    error = compare(torch.tensor([3.0, -4.5, 0.0]), exact)
    assert error.sqnr_db == pytest.approx(10 * math.log10(25 / 0.25), abs=1e-6)
    assert error.zeros == pytest.approx(1 / 3)
    assert error.flushed == pytest.approx(1e-9 / 5)
    assert compare(exact.clone(), exact).sqnr_db == math.inf
    assert compare(torch.tensor([math.nan]), exact[:1]).sqnr_db == -math.inf


def test_gradients_that_are_zero_in_exact_arithmetic_are_no_fault():
    reference = {"a": torch.ones(4, dtype=torch.float64), "b": torch.full((4,), 1e-12).double()}
    actual = {"a": torch.ones(4), "b": torch.full((4,), 5.0)}
    assert GradientErrors(actual, reference).missing() == {}
    actual["a"] = torch.tensor([9.0, -9.0, 9.0, 1.0])  # noise, but nothing is missing
    assert GradientErrors(actual, reference).missing() == {}
    actual["a"] = torch.zeros(4)
    assert list(GradientErrors(actual, reference).missing()) == ["a"]


@pytest.mark.parametrize(("elements", "missing"), [(1, []), (8, ["a"])])
def test_a_gradient_of_few_elements_is_short_by_chance(elements, missing):
    """As that of a bias whose terms cancel: 0.0034 in place of 0.041, beside weights of 3."""
    reference = {"a": torch.full((elements,), 0.041).double(), "b": torch.full((64,), 3.0).double()}
    actual = {"a": torch.full((elements,), 0.0034), "b": torch.full((64,), 3.0)}
    assert list(GradientErrors(actual, reference).missing()) == missing
    actual["a"] = torch.zeros(elements)
    assert list(GradientErrors(actual, reference).missing()) == ["a"]


def test_what_is_wrong_with_a_tensor():
    assert bad_bits(torch.tensor([1.0, -2.0])) == 0
    assert bad_bits(torch.tensor([math.inf, 1.0])) == POSITIVE
    assert bad_bits(torch.tensor([math.inf, -math.inf])) == POSITIVE | NEGATIVE
    assert bad_bits(torch.tensor([math.inf, math.nan])) == NAN
    assert bad_bits(torch.tensor([1, 2])) == 0
    assert bad_bits(torch.empty(0)) == 0


def test_no_decibels_are_not_negative_ones():
    assert "an SQNR of 0 dB" in in_words({"head.weight": -0.2})


def constants(model, batch):
    h = model(batch)
    made = (
        torch.tensor([0.3, 0.999], dtype=h.dtype), h.new_tensor(0.999), h.new_tensor(data=0.3),
        torch.as_tensor(0.3, dtype=h.dtype), torch.full((2,), 0.3, dtype=h.dtype),
    )  # fmt: skip
    return (h[:, :2] * sum(made)).square().mean()


def test_numbers_that_become_tensors_are_exact_in_the_shadow():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.SiLU()), data(4, 8)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    again = Replay(step)
    stash = again.rehearsal(lambda step, x: step.micro_batch(constants, x), [batch])
    run = shadow(again, stash)
    assert run.replayed.error is None  # of a derivative that is made of other operations
    exact = constants(copy.deepcopy(model).double(), batch.double())
    assert float(run.losses[0]) == pytest.approx(float(exact.detach()), rel=1e-12)
    made = [each for each in run.errors if each.name == "tensor"]
    assert [each.dtype for each in made] == ["bfloat16"] * 4
    assert all(40 < each.local_db < math.inf for each in made)
    line = made[0].place.file, made[0].place.line
    rounded = shadow(again, stash, errors=False, rounds=Rounds.on([line]))
    assert float(rounded.losses[0]) != pytest.approx(float(exact.detach()), rel=1e-5)


def test_an_index_that_is_out_of_range_without_rounding_ends_no_replay():
    model = nn.Linear(4, 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")

    def loss(model, batch):
        seats = (torch.tensor([257.0]).bfloat16() - 256).long()  # 0, and 1 without rounding
        return model(batch)[seats].float().sum()

    again = Replay(step)
    stash = again.rehearsal(lambda step, x: step.micro_batch(loss, x), [data(1, 4)])
    assert shadow(again, stash, decides=True).replayed.error is None
