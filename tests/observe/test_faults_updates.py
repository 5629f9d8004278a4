"""Updates of scripts that nobody changed which break a parameter: a step later it is known why."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tests.observe.inside import line_of, observe

SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F

kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.manual_seed(0)


class Noisy(torch.optim.Optimizer):
    # Draws numbers, counts, and divides by the root of a mean that float16 loses.
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        self.count, self.seen = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.seen.append(self.count)
        for p in self.param_groups[0]["params"]:
            state = self.state.setdefault(p, {"exp_avg": torch.zeros_like(p), "mean": torch.zeros_like(p)})
            state["exp_avg"].lerp_(p.grad, 0.5)
            state["mean"].addcmul_(p.grad, p.grad, value=1e-3)
            noise = 1 + 0.1 * torch.rand_like(p)
            p.sub_(1e-3 * noise * state["exp_avg"] / state["mean"].sqrt())  # divides


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)
called = []
if kind == "noisy":
    optimizer = Noisy(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
elif kind == "momentum":
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.99)
elif kind == "by hand":
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
elif kind == "foreach":
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=True)
else:
    optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
size = 6e4 if kind == "momentum" else 0.1
losses, count = [], 0
for index in range(6):
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    loss = F.mse_loss(model(x.to(dtype)).float(), y) * size
    if kind == "momentum":
        loss = model(x.to(dtype)).float().mean() * size
    losses.append(float(loss.detach()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # update
    schedule.step()
    if kind == "by hand" and index == 2:
        with torch.no_grad():
            model[0].weight[3, 3] = torch.inf
state = [each for each in optimizer.state.values()]
kept = [called, getattr(optimizer, "count", 0), getattr(optimizer, "seen", []), len(vars(optimizer))]
torch.save([model.state_dict(), losses, torch.get_rng_state(), state, kept], sys.argv[3])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def fault_of(script, kind, dtype="float16"):
    (found,) = observe(script, kind, dtype, str(script.parent / "out.pt")).report.faults
    return found


@pytest.mark.parametrize("kind", ["Adam", "RMSprop", "Adagrad", "foreach"])
def test_an_eps_that_float16_lacks_is_found_in_the_update_before(script, kind):
    found = fault_of(script, kind)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", "EPS_UNDERFLOW")
    assert found.origin is not None
    assert (found.origin.file, found.origin.line) == (str(script), line_of(script, "# update"))
    assert found.origin.source == "optimizer.step()  # update"
    assert found.step == 1
    assert "is lost in float16" in found.explanation
    assert "of 0.weight that are not" in found.explanation
    assert any("loses the same" in each for each in found.notes)
    assert {each.what: each.verified for each in found.fixes} == {
        "float32 parameters and optimizer state": False,
        "a larger eps in the optimizer": False,
    }
    assert "the update is then finite" in found.fixes[1].cost


def test_an_optimizer_of_one_s_own_is_named_with_its_line(script):
    found = fault_of(script, "noisy")
    assert (found.phase, found.step) == ("optimizer", 1)
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("div", line_of(script, "# divides"))


def test_a_momentum_that_overflows_is_named(script):
    found = fault_of(script, "momentum")
    assert (found.phase, found.cause) == ("optimizer", "RANGE_OVERFLOW")
    assert found.origin is not None
    assert found.origin.op == "momentum_buffer of SGD"
    assert found.origin.line == line_of(script, "# update")
    assert "it is kept in float16, which ends at 65,504" in found.explanation


def test_nothing_is_claimed_of_an_update_that_is_finite_when_made_again(script):
    found = fault_of(script, "by hand", "float32")
    assert (found.phase, found.cause, found.step) == ("forward", "BAD_PARAMETER", 4)
    assert any("is finite: whether it made it so cannot be known" in each for each in found.notes)


@pytest.mark.parametrize("kind", ["Adam", "noisy", "momentum", "by hand"])
def test_training_does_not_notice(script, monkeypatch, kind):
    """Parameters, state, losses, random numbers, hooks and attributes, bit for bit."""
    plain = script.parent / "plain.pt"
    monkeypatch.setattr(sys, "argv", [str(script), kind, "float16", str(plain)])
    runpy.run_path(str(script), run_name="__main__")
    fault_of(script, kind)
    (a, *rest), (b, *others) = torch.load(plain), torch.load(script.parent / "out.pt")
    assert all(torch.equal(a[key].nan_to_num(7.0), b[key].nan_to_num(7.0)) for key in a)
    torch.set_printoptions(profile="full")
    assert repr(rest) == repr(others)


TWO = """
import sys, torch
from torch import nn
from torch.nn.functional import softplus

torch.manual_seed(0)
generator, critic = nn.Linear(4, 8).half(), nn.Linear(8, 1).half()
of_generator = torch.optim.SGD(generator.parameters(), 1e-3)
of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
for index in range(4):
    real, noise = torch.randn(16, 8).half(), torch.randn(16, 4).half()
    fake = generator(noise)
    loss = (softplus(critic(fake.detach()).float()) + softplus(-critic(real).float())).mean() * 1e-2
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()  # of the critic
    if sys.argv[1] == "counts":
        loss = softplus(-critic(fake).float()).mean() * (index + torch.ones(()).sum().item())
    else:
        loss = softplus(-critic(fake).float()).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
"""


@pytest.mark.parametrize("kind", ["plain", "counts"])
def test_of_several_optimizers_it_is_the_one_whose_parameter_it_is(tmp_path, kind):
    """Also where the step that it shows in cannot be run again."""
    path = tmp_path / "two.py"
    path.write_text(TWO)
    found = observe(path, kind).report.faults[0]
    assert (found.phase, found.cause, found.step) == ("optimizer", "EPS_UNDERFLOW", 1)
    assert found.origin is not None
    assert found.origin.line == line_of(path, "# of the critic")
    assert "The update of step 1, by Adam, made it so." in found.explanation
