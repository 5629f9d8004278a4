"""Iterations of any loop: several updates, one step; and what a replay makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ampwise.errors import PolicyError, SkippedStepsError, UsageError
from ampwise.step import LossScale, TrainStep
from ampwise.step.modules import as_one, in_form
from ampwise.step.recorder import Recorder
from ampwise.step.replay import Replay

REAL = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


def made(precision="fp32", fused=True, **settings) -> TrainStep:
    torch.manual_seed(0)
    models = {
        "generator": nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
        "critic": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
    }
    optimizers = {
        name: torch.optim.Adam(each.parameters(), lr=0.01, fused=fused)
        for name, each in models.items()
    }
    return TrainStep(models, optimizers, policy=precision, **settings)


def gan(step: TrainStep, real: Tensor, *, last: float = 1.0) -> Tensor:
    generator, critic = step.model["generator"], step.model["critic"]
    with step.autocast():
        fake = generator(torch.randn(len(real), 2))
        loss = softplus(critic(fake.detach()).float()).mean()
        loss = loss + softplus(-critic(real).float()).mean()
    step.backward(loss, optimizers=[step.optimizer["critic"]])
    step.update([step.optimizer["critic"]], update_scale=False)
    with step.autocast():
        fooled = softplus(-critic(fake).float()).mean() * last
    step.backward(fooled, optimizers=[step.optimizer["generator"]])
    step.update([step.optimizer["generator"]])
    return loss


def breaks(step: TrainStep, real: Tensor) -> Tensor:
    return gan(step, real, last=math.inf)


def state(step: TrainStep) -> dict[str, Tensor]:
    whole = as_one(step.model).state_dict()
    return {name: each.clone() for name, each in whole.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# -- a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-master"])
def test_an_iteration_is_its_parts_in_one_step(precision):
    by_hand, whole = made(precision), made(precision)
    for step in (by_hand, whole):
        torch.manual_seed(1)
        for _ in range(3):
            loss = gan(step, REAL) if step is by_hand else step.iterate(gan, REAL)
    assert same(state(by_hand), state(whole))
    assert len(whole.history) == whole.steps == 3
    assert whole.boundary
    assert float(loss) == pytest.approx(whole.history[-1].loss)
    # By hand the losses add up: nobody says which of them is to be told.
    assert by_hand.history[-1].loss > whole.history[-1].loss + 0.1


def test_the_loss_scale_adapts_once_to_all_that_an_iteration_found():
    step = made("fp16", loss_scale=LossScale(64.0, growth_interval=2))
    for _ in range(2):
        step.iterate(lambda step, real: gan(step, real), REAL)
    assert float(step.loss_scale.scale) == 128.0
    before = state(step)
    step.iterate(breaks, REAL)
    assert float(step.loss_scale.scale) == 64.0
    record = step.history[-1]
    assert record.skipped
    assert math.isfinite(record.loss)  # the one that was returned
    after = state(step)
    moved = {n.partition(".")[0] for n in before if not torch.equal(before[n], after[n])}
    assert moved == {"critic"}  # its own update was sound


def test_too_many_skipped_iterations_end_training():
    step = made(max_skips=3)
    with pytest.raises(SkippedStepsError):
        for _ in range(4):
            step.iterate(breaks, REAL)


def test_what_ran_is_that_of_all_losses():
    step = made("bf16:islands=critic")
    step.iterate(gan, REAL)  # warns of nothing: the generator is not in the first loss's graph
    assert step.activity.matmul_dtypes["bfloat16"] == 2
    assert step.activity.matmul_dtypes["float32"] == 6


def test_an_error_drops_what_is_open_and_the_next_iteration_is_as_any():
    def fails(step, real):
        with step.autocast():
            loss = step.model["critic"](real).mean()
        step.backward(loss)
        raise ZeroDivisionError

    step, other = made(), made()
    with pytest.raises(ZeroDivisionError):
        step.iterate(fails, REAL)
    assert step.position == step.steps == 0
    assert all(each.grad is None for each in step.parameters().values())
    for each in (step, other):
        torch.manual_seed(1)
        each.iterate(gan, REAL)
    assert same(state(step), state(other))


@pytest.mark.parametrize(
    ("iteration", "settings", "message"),
    [
        (lambda step, x: x.sum(), {}, "returned without step.update()"),
        (lambda step, x: gan(step, x) and None, {}, "got NoneType"),
        (lambda step, x: gan(step, x) * x, {}, "got shape (16, 4)"),
        (gan, {"accumulate": 2}, "expected a step with accumulate=1, got 2"),
        (lambda step, x: step(gan, x), {}, "step() inside an iteration"),
        (lambda step, x: step.iterate(gan, x), {}, "iterate() inside an iteration"),
    ],
)
def test_what_an_iteration_cannot_do_is_said_in_a_line(iteration, settings, message):
    step = made(**settings)
    with pytest.raises(UsageError) as raised:
        step.iterate(iteration, REAL)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_gradients_that_no_update_used_are_said():
    """In a GAN they are the generator's loss in the critic, the wrong way round."""

    def careless(step, real):
        loss = gan(step, real)
        with step.autocast():
            rest = step.model["critic"](real).mean()
        step.backward(rest)
        return loss

    with pytest.warns(UserWarning, match="no update used, for Adam at 1 of the optimizers"):
        made().iterate(careless, REAL)


# -- names -----------------------------------------------------------------------------------------


def test_names_begin_with_the_key_of_a_mapping_or_the_position_in_a_sequence():
    step = made()
    assert list(step.parameters())[:2] == ["generator.0.weight", "generator.0.bias"]
    assert "critic.2.bias" in step.parameters()
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([p for each in models for p in each.parameters()], lr=0.1)
    assert list(TrainStep(models, optimizer, policy="fp32").parameters())[2:] == [
        "1.weight",
        "1.bias",
    ]
    assert list(TrainStep(models[:1], optimizer, policy="fp32").parameters()) == ["weight", "bias"]


def test_islands_are_named_across_models():
    step = made("bf16:islands=critic.0+generator.3")
    step.iterate(gan, REAL)
    with pytest.raises(PolicyError, match=r"no module matches 'critic\.7'"):
        made("bf16:islands=critic.7")


def test_the_form_of_what_was_given_stays():
    assert in_form({"a": 1, "b": 2}, str) == {"a": "1", "b": "2"}
    assert in_form((1, 2), str) == ("1", "2")
    assert in_form([1], str) == ["1"]
    model = nn.Sequential(nn.ReLU())
    assert in_form(model, lambda each: each) is model


def test_a_key_may_be_what_every_module_has_as_an_attribute():
    held = as_one({"train": nn.Linear(1, 1), "forward": nn.Linear(1, 1)})
    assert list(dict(held.named_parameters()))[::2] == ["train.weight", "forward.weight"]
    assert not held.eval().training


# -- other loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_gradient_penalty_has_the_gradients_of_float64(precision):
    """Its gradient goes through a gradient: create_graph, and a second backward."""

    def steepness(critic, x):
        x = x.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return slopes.square().sum(1).mean()

    def iteration(step, real):
        with step.autocast():
            loss = steepness(step.model, real) + step.model(real).float().mean()
        step.backward(loss)
        seen.update({name: each.clone() for name, each in step.gradients().items()})
        step.update()
        return loss

    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))
    reference = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1)).double()
    reference.load_state_dict(critic.state_dict())
    loss = steepness(reference, REAL.double()) + reference(REAL.double()).mean()
    loss.backward()
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    scale = LossScale(1024.0) if precision == "fp16" else None
    step = TrainStep(critic, optimizer, policy=precision, loss_scale=scale)
    step.iterate(iteration, REAL)
    bound = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}[precision]
    for name, each in reference.named_parameters():
        wrong = (seen[name].double() - each.grad).norm() / each.grad.norm()
        assert wrong < bound, name


def test_actor_and_critic_on_one_trunk_add_up():
    """Two losses, one trunk, two optimizers: the trunk gets the gradient of both."""

    def losses(models, batch):
        features = models["trunk"](batch)
        value = models["critic"](features).squeeze(-1)
        chosen = models["actor"](features).log_softmax(-1)[:, 0]
        advantage = (1.0 - value).detach()
        return -(chosen * advantage).mean(), (1.0 - value).square().mean()

    def iteration(step, batch):
        with step.autocast():
            actor, critic = losses(step.model, batch)
        step.backward(actor, retain_graph=True)
        step.backward(0.5 * critic)
        step.update()
        return actor.detach() + critic.detach()

    def built():
        torch.manual_seed(0)
        names = {"trunk": 8, "actor": 3, "critic": 1}
        models = {n: nn.Linear(4 if n == "trunk" else 8, width) for n, width in names.items()}
        shared = [*models["trunk"].parameters(), *models["actor"].parameters()]
        return models, [
            torch.optim.SGD(shared, lr=0.1),
            torch.optim.SGD(models["critic"].parameters(), lr=0.2),
        ]

    models, optimizers = built()
    step = TrainStep(models, optimizers, policy="fp32")
    step.iterate(iteration, REAL)
    plain, theirs = built()
    actor, critic = losses(plain, REAL)
    (actor + 0.5 * critic).backward()
    for each in theirs:
        each.step()
    for name in models:
        torch.testing.assert_close(models[name].state_dict(), plain[name].state_dict())


# -- replays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-master"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_replay_gives_the_iteration_again_and_changes_nothing(precision, fused):
    step = made(precision, fused)
    step.recorder = Recorder()
    torch.manual_seed(1)
    step.iterate(gan, REAL)
    step.iterate(breaks, REAL)  # the critic has moved when the generator's loss breaks
    before, drawn = state(step), torch.get_rng_state()
    stash = Replay(step).closed
    for _ in range(2):
        again = Replay(step).replay(stash)
        assert again.error is None
        assert not again.clean
        assert [float(each) for each in again.losses] == [float(each) for each in stash.losses]
        pairs = zip(again.norms, stash.norms, strict=True)
        assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in pairs)
    assert same(state(step), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {name.partition(".")[0] for name in again.gradients} == {"generator", "critic"}


def test_a_replay_in_another_precision_goes_on_from_the_recorded_update():
    """So the generator's gradients are those at the critic that it really met."""
    met: list[Tensor] = []

    def iteration(step, real):
        loss = gan(step, real)
        met.append(step.model["critic"][0].weight.detach().clone())
        return loss

    step = made("fp32")
    step.recorder = Recorder()
    step.iterate(iteration, REAL)
    result = Replay(step).replay(Replay(step).closed, policy=made("bf16").policy)
    assert result.clean
    assert not torch.equal(met[0], made().model["critic"][0].weight)
    assert torch.equal(met[0], met[1])


def test_an_optimizer_that_updates_twice_has_both_gradients():
    def twice(step, x):
        for _ in range(2):
            with step.autocast():
                loss = step.model(x).square().mean()
            step.backward(loss)
            step.update()
        return loss

    model = nn.Linear(4, 1)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    step.recorder = Recorder()
    step.iterate(twice, REAL)
    again = Replay(step).replay(Replay(step).closed)
    assert list(again.gradients) == [
        "weight",
        "bias",
        "weight (update 2)",
        "bias (update 2)",
    ]
    assert not torch.equal(again.gradients["weight"], again.gradients["weight (update 2)"])
    assert [float(each) for each in again.losses] == [
        float(each) for each in Replay(step).closed.losses
    ]


def test_forwards_alone_make_all_losses_and_no_gradient():
    step = made()
    step.recorder = Recorder()
    step.iterate(gan, REAL)
    again = Replay(step).replay(Replay(step).closed, backward=False)
    assert len(again.losses) == 2
    assert not again.gradients
    assert [float(e) for e in again.losses] == [float(e) for e in Replay(step).closed.losses]


def test_an_iteration_may_end_at_the_first_loss_that_is_not_finite():
    step = made()
    before = state(step)
    stash = Replay(step).rehearsal(lambda step, x: step.iterate(gan, x), [REAL * float("nan")])
    assert len(Replay(step).replay(stash).losses) == 2
    ended = Replay(step).replay(stash, until_bad=True)
    assert len(ended.losses) == 1
    assert not ended.clean
    assert same(state(step), before)


def test_a_rehearsal_leaves_parameters_where_they_are():
    step = made()
    before = state(step)
    stash = Replay(step).rehearsal(lambda step, x: step.iterate(gan, x), [REAL])
    result = Replay(step).replay(stash)
    assert result.clean
    assert len(result.losses) == 2
    assert same(state(step), before)


def test_training_asks_why_an_iteration_was_skipped():
    found = []
    step = made("fp32", on_fault=found.append)
    step.iterate(gan, REAL)
    step.iterate(breaks, REAL)
    (diagnosis,) = found
    assert diagnosis.status == "fault"
    assert diagnosis.step == 2
    assert "* last" in diagnosis.origin.source
