"""Updates that are finite, and not what float64 makes of the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.bench.arm import Settings
from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.updates.followed import follow
from ampwise.numerics.updates.of_task import Trained
from ampwise.policy import Policy
from ampwise.tasks import Task
from tests.numerics.cases import CASES, data, line_of

BF16 = torch.bfloat16


class Own(torch.optim.Optimizer):
    """An optimizer that updates a parameter at a time."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group["lr"])


class Lookahead(Own):
    def update(self, p, grad, state, lr):
        if not state:
            state["slow"] = p.to(BF16)
        p.add_(grad, alpha=-lr)
        state["slow"].add_(p.to(BF16) - state["slow"], alpha=0.5)  # <- here
        p.copy_(state["slow"])


class Rebound(Own):
    """Its sum of squares is a new tensor each time."""

    def update(self, p, grad, state, lr):
        total = state.get("sum", torch.ones_like(p, dtype=BF16))
        state["sum"] = total + grad.square().to(BF16)  # <- here
        p.addcdiv_(grad, state["sum"].float().sqrt(), value=-lr)


class Flushed(Own):
    def update(self, p, grad, state, lr):
        if not state:
            state["m"] = torch.zeros_like(p, dtype=torch.float16)
        state["m"].lerp_((1e-7 * grad).half(), 0.1)  # <- here
        p.add_(state["m"].float(), alpha=-lr * 1e7)


class HalfArithmetic(Own):
    def update(self, p, grad, state, lr):
        half = p.half() - lr * grad.half()  # <- here
        p.copy_(half)


class Outside(Own):
    """What it keeps is no state of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.kept = {p: p.detach().half() for p in self.param_groups[0]["params"]}

    def update(self, p, grad, state, lr):
        p.add_(grad, alpha=-lr)
        self.kept[p].mul_(0.999).add_(p.half(), alpha=0.001)  # <- here


class Momentum(Own):
    """Momentum in bfloat16 forgets soon enough."""

    def update(self, p, grad, state, lr):
        if not state:
            state["m"] = torch.zeros_like(p, dtype=BF16)
        state["m"].mul_(0.9).add_(grad.to(BF16), alpha=0.1)
        p.add_(state["m"].float(), alpha=-lr)


class Masters(Own):
    """Parameters in bfloat16, rounded anew from float32."""

    def update(self, p, grad, state, lr):
        if not state:
            state["master"] = p.float()
        state["master"].add_(grad.float(), alpha=-lr)
        p.copy_(state["master"])


class Compensated(Own):
    def update(self, p, grad, state, lr):
        if not state:
            state["slow"], state["rest"] = p.to(BF16), torch.zeros_like(p, dtype=BF16)
        step = state["rest"] - (lr * grad).to(BF16)
        new = state["slow"] + step
        state["rest"], state["slow"] = step - (new - state["slow"]), new
        p.copy_(new.float() + state["rest"].float())


class ByChance(Own):
    def update(self, p, grad, state, lr):
        if not state:
            state["slow"] = p.to(BF16)
        exact = state["slow"].float() - lr * grad
        bits = exact.view(torch.int32) + torch.randint_like(exact, 1 << 16, dtype=torch.int32)
        state["slow"] = (bits & -65536).view(torch.float32).to(BF16)
        p.copy_(state["slow"])


class Wide(Own):
    def update(self, p, grad, state, lr):
        state["slow"] = torch.lerp(state.get("slow", p.clone()), p, 0.001)
        p.add_(grad, alpha=-lr)


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def task(optimizer, model=network, iteration=None):
    batch = data(16, 8)
    return Task(
        model=model,
        batches=lambda: [batch] * 8,
        loss=None if iteration else lambda m, b: F.mse_loss(m(b).float(), b.flip(-1)),
        iteration=iteration,
        optimizer=optimizer,
    )


def of(kind, lr=1e-3):
    return task(lambda m: kind(m.parameters(), lr))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Lookahead, "STAGNATION"),
        (Rebound, "STAGNATION"),
        (Flushed, "UNDERFLOW"),
        (HalfArithmetic, "PRECISION_LOSS"),
        (Outside, "STAGNATION"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_an_update_that_is_finite_and_wrong_is_a_fault_at_the_line_that_rounds(kind, cause):
    found = diagnose(of(kind), precision="bf16", steps=8)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", cause)
    assert found.origin.line == line_of(kind)
    assert "not what float64 makes of the same gradients" in found.explanation


class Sent(Own):
    """What changes goes through float16, in units in which most of it is 0."""

    def update(self, p, grad, state, lr):
        change = (-lr * grad / 3e4).half()  # <- here
        state.setdefault("sum", torch.zeros_like(p)).add_(change.float())
        p.add_(change.float(), alpha=3e4)


def test_what_an_update_flushes_is_said_by_its_elements():
    found = diagnose(of(Sent), precision="fp16", steps=8)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", "UNDERFLOW")
    assert found.origin.line == line_of(Sent)
    assert "results of _to_copy on line" in found.explanation


class Tiny(Own):
    """Its squares end as 0, so that it goes as far as a division by eps takes it."""

    def update(self, p, grad, state, lr):
        if not state:
            state["squares"] = torch.zeros_like(p, dtype=torch.float16)
        squares = state["squares"]
        squares.mul_(0.99).add_((1e-6 * grad).square(), alpha=0.01)  # <- here
        p.sub_(lr * 1e-6 * grad / (squares.float().sqrt() + 1e-30))


def test_a_step_that_fails_after_updates_that_went_too_far_shows_these():
    found = diagnose(of(Tiny), precision="bf16", steps=8)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", "UNDERFLOW")
    assert found.origin.line == line_of(Tiny)


def test_what_one_update_made_is_known_after_steps_that_are_skipped():
    """A loss scale that has to come down for what the update has led to."""

    class Far(Tiny):
        def update(self, p, grad, state, lr):
            super().update(p, grad, state, 1e-17 * lr)

    run = follow(Trained(of(Far), Policy.parse("fp16"), Settings(torch.device("cpu")), 4), 4)
    assert (run.updates, run.steps) == (1, 4)
    assert run.went_too_far


@pytest.mark.parametrize("kind", [Momentum, Compensated, ByChance, Wide], ids=lambda e: e.__name__)
def test_an_update_that_loses_nothing_is_none(kind):
    assert diagnose(of(kind), precision="bf16", steps=8).status == "clean"


def test_parameters_in_16_bits_that_have_masters_are_none():
    made = task(lambda m: Masters(m.parameters(), 1.0), lambda: network().to(BF16))
    assert diagnose(made, precision="bf16", steps=8).status == "clean"


def teacher_and_student(dtype):
    student = network()
    return {"student": student, "teacher": copy.deepcopy(student).to(dtype).requires_grad_(False)}


def distil(step, batch):
    student, teacher = step.model["student"], step.model["teacher"]
    with step.autocast():
        loss = F.mse_loss(student(batch).float(), teacher(batch).float() + 1)
    step.backward(loss)
    step.update()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast.to(slow.dtype), 0.002)  # <- here
    return loss


@pytest.mark.parametrize(("dtype", "status"), [(BF16, "fault"), (torch.float32, "clean")])
def test_an_average_of_weights_that_an_iteration_makes_is_followed(dtype, status):
    made = task(
        lambda m: torch.optim.Adam(m["student"].parameters()),
        lambda: teacher_and_student(dtype),
        distil,
    )
    found = diagnose(made, precision="bf16", steps=8)
    assert found.status == status
    if status == "fault":
        assert found.origin.line == line_of(distil)


class Prototypes(nn.Module):
    """Averages in float32, whose update is computed in the format of what is averaged."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.register_buffer("mean", torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        z = self.encode(x)
        with torch.no_grad():
            self.mean.copy_(self.followed(z))
        return z - self.mean

    def followed(self, z):
        return torch.lerp(self.mean.to(z.dtype), z.mean(0), 0.002)  # <- here


class WidePrototypes(Prototypes):
    """What is added is in 16 bits, the average is not."""

    def followed(self, z):
        return 0.998 * self.mean + 0.002 * z.mean(0)


class Queue(Prototypes):
    """What it keeps moves on, and is rounded once."""

    def followed(self, z):
        return torch.cat((self.mean[1:].to(z.dtype), z.mean().view(1)))


@pytest.mark.parametrize("model", [Prototypes, WidePrototypes, Queue])
def test_a_float32_buffer_whose_update_is_rounded_is_followed(model):
    torch.manual_seed(0)
    found = diagnose(task(lambda m: torch.optim.Adam(m.parameters()), model), "bf16", steps=8)
    if model is not Prototypes:
        assert found.status == "clean", found.explanation
        return
    assert (found.status, found.phase) == ("fault", "optimizer"), found.notes
    assert found.origin.line == line_of(model)


def test_optimizers_of_torch_are_not_trained_again(monkeypatch):
    monkeypatch.setattr("ampwise.numerics.updates.followed.follow", None)  # would raise
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        assert diagnose(of(kind), precision="bf16", steps=4).status == "clean"


class Aliased(Lookahead):
    """As a patch that only changes the format would have it: `to` makes no copy then."""

    def update(self, p, grad, state, lr):
        if not state:
            state["slow"] = self.begin(p)
        p.add_(grad, alpha=-lr)
        state["slow"].add_(p - state["slow"], alpha=0.5)
        p.copy_(state["slow"])

    def begin(self, p):
        return p.to(torch.float32)


class Copied(Aliased):
    def begin(self, p):
        return p.to(torch.float32, copy=True)


def test_another_optimizer_is_held_against_float64_of_the_first_from_the_same_gradients():
    def followed(kind, **given):
        made = Trained(of(kind), Policy.parse("bf16"), Settings(torch.device("cpu")), 6)
        return follow(made, 6, **given)

    first = followed(Lookahead)
    ideal = {each.name: each.ideal for each in first.changes}
    again = followed(Lookahead, given=first.gradients)
    assert again.kept_of_db(ideal) == first.kept_db()
    alias, copied = (
        followed(kind, given=first.gradients, also=ideal) for kind in (Aliased, Copied)
    )
    assert alias.kept_of_db(ideal) < 10 < 40 < copied.kept_of_db(ideal)


# -- parameters that are made in 16 bits -----------------------------------------------------------


class Plain(Own):
    def update(self, p, grad, state, lr):
        p.sub_(lr * grad)  # <- here


class Small(Masters):
    """None of its steps moves most of the rounded weights."""


class MastersAtOnce(Own):
    """Float32 masters from the beginning."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.masters = {p: p.detach().float() for p in self.param_groups[0]["params"]}

    def update(self, p, grad, state, lr):
        self.masters[p].sub_(lr * grad.float())
        p.copy_(self.masters[p])


class Kahan(Own):
    """What rounding loses is added to the next step."""

    def update(self, p, grad, state, lr):
        if not state:
            state["rest"] = torch.zeros_like(p)
        step = state["rest"] - lr * grad
        new = p + step
        state["rest"] = step - (new - p)
        p.copy_(new)


class Stochastic(Own):
    def update(self, p, grad, state, lr):
        exact = p.float() - lr * grad.float()
        bits = exact.view(torch.int32) + torch.randint_like(exact, 1 << 16, dtype=torch.int32)
        p.copy_((bits & -65536).view(torch.float32))


def narrow_network():
    return network().to(BF16)  # <- here


def partly_frozen():
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    made[0].to(BF16).requires_grad_(requires_grad=False)
    return made


def test_weights_that_do_not_move_are_placed_where_they_are_made():
    found = diagnose(task(lambda m: Plain(m.parameters()), narrow_network), "bf16", steps=8)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", "STAGNATION")
    assert (found.origin.line, found.origin.op) == (line_of(narrow_network), "_to_copy")
    assert f"made in bfloat16 on line {line_of(narrow_network)} of test_updates.py" in (
        found.explanation
    )
    assert f"the update is made on line {line_of(Plain)} of test_updates.py" in found.explanation
    (advice,) = found.fixes
    assert advice.verified
    assert advice.how == "keep the parameters in float32: autocast computes in bfloat16 anyway"
    elsewhere = diagnose(CASES["bfloat16 weights"].make(), "fp32", steps=6)
    assert "--precision bf16" in elsewhere.fixes[0].how  # which changes something there


@pytest.mark.parametrize("kind", [Small, MastersAtOnce, Kahan, Stochastic])
def test_weights_whose_rounding_loses_nothing_may_stay(kind):
    made = task(lambda m: kind(m.parameters(), 1e-4), narrow_network)
    found = diagnose(made, "bf16", steps=8)
    assert found.status == "clean", found.explanation


def test_so_may_frozen_ones():
    def trained(model):
        return Plain([each for each in model.parameters() if each.requires_grad])

    assert diagnose(task(trained, partly_frozen), "bf16", steps=8).status == "clean"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_of_an_optimizer_of_torch_no_line_of_an_update_is_named(kind, monkeypatch):
    monkeypatch.setattr("ampwise.numerics.updates.behind.follow", None)  # would raise
    made = task(lambda m: kind(m.parameters(), lr=1e-5), narrow_network)
    found = diagnose(made, "bf16", steps=4)
    assert (found.cause, found.origin.line) == ("STAGNATION", line_of(narrow_network))
    assert "the update is made" not in found.explanation


def test_bfloat16_throughout_is_left_as_it_is():
    made = task(lambda m: torch.optim.SGD(m.parameters(), lr=1e-5), narrow_network)
    assert diagnose(made, "bf16-pure", steps=4).status == "clean"


def test_a_parameter_that_an_update_loses_in_16_bits_is_placed_where_it_is_made():
    batch = data(16, 8)

    def model():
        return network().half()  # <- here

    made = Task(
        model=model,
        batches=lambda: [batch] * 8,
        loss=lambda m, b: 1e-4 * F.mse_loss(m(b).float(), b),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), 1e-3),
    )
    found = diagnose(made, "fp16:scaling=off", steps=4)
    assert (found.phase, found.cause) == ("optimizer", "EPS_UNDERFLOW")
    assert found.origin.line == line_of(model)


def test_a_patch_of_parameters_begins_with_the_weights_that_were_rounded():
    def followed(model, **given):
        made = task(lambda m: Plain(m.parameters()), model)
        return follow(
            Trained(made, Policy.parse("bf16"), Settings(torch.device("cpu")), 2), 2, **given
        )

    names = [name for name, _ in network().named_parameters()]
    first = followed(narrow_network, also=names)
    assert set(first.began) == set(names)
    zeros = {name: torch.zeros_like(each) for name, each in first.began.items()}
    again = followed(network, also=names, began=zeros)
    begun = {each.name: each.holds - each.actual for each in again.changes}
    assert begun.keys() == zeros.keys()
    assert not any(each.abs().max() > 1e-6 for each in begun.values())
