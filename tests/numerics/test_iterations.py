"""Faults in loops of several models and losses: the part, the line and the cause have to be right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ampwise import TrainStep, diagnose
from ampwise.bench.arm import Settings
from ampwise.numerics.diagnose import DiagnoseConfig, explore
from ampwise.numerics.progress import Silent
from ampwise.policy import PRESETS
from ampwise.tasks import Task
from ampwise.tune.run import TuneConfig, make_hold
from tests.numerics.cases import line_of

CPU = torch.device("cpu")


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = 1000 * self.inner(x)
        energy = large * large  # <- here
        return self.outer(energy / (1 + energy))


def networks() -> dict[str, nn.Module]:
    return {"generator": nn.Linear(2, 4), "critic": nn.Linear(4, 1)}


def task(iteration, models=networks) -> Task:
    def batches():
        source = torch.Generator().manual_seed(0)
        for _ in range(4):
            yield torch.randn(16, 4, generator=source)

    def optimizers(models):
        return {name: torch.optim.SGD(e.parameters(), lr=0.5) for name, e in models.items()}

    return Task(model=models, batches=batches, iteration=iteration, optimizer=optimizers)


def gan(step, real, fooled=lambda logits: softplus(-logits).mean()):
    generator, critic = step.model.values()
    with step.autocast():
        fake = generator(torch.randn(len(real), 2))
        loss = softplus(critic(fake.detach()).float()).mean()
        loss = loss + softplus(-critic(real).float()).mean()
    step.backward(loss, optimizers=[step.optimizer["critic"]])
    step.update([step.optimizer["critic"]])
    with step.autocast():
        wrong = fooled(critic(fake).float())
    step.backward(wrong, optimizers=[step.optimizer["generator"]])
    step.update([step.optimizer["generator"]])
    return loss


def in_the_second_part(step, real):
    def fooled(logits):
        return -(logits - logits.max()).clamp(min=0).log().mean()  # <- here

    return gan(step, real, fooled)


def in_the_penalty(step, real):
    """The gradient of a norm that is 0: R1 with a square root."""
    critic, noise = step.model["critic"], torch.zeros_like(real).requires_grad_()
    with step.autocast():
        (slopes,) = torch.autograd.grad(critic(noise).sum() * 0, noise, create_graph=True)
        loss = critic(real).float().mean() + slopes.float().square().sum(1).sqrt().mean()  # <- here
    step.backward(loss)
    step.update()
    return loss


def test_a_fault_after_an_update_is_found_where_it_is():
    """log(0) in the generator's loss, when the critic has moved already."""
    found = diagnose(task(in_the_second_part), "bf16", steps=3)
    assert (found.status, found.phase, found.cause) == ("fault", "forward", "DOMAIN_ERROR")
    assert found.step == 1
    assert found.origin.op == "log"
    assert found.origin.line == line_of(in_the_second_part)


def test_a_fault_in_one_of_several_models_is_named_with_its_key():
    def loud():
        return {"generator": nn.Linear(2, 4), "critic": Loud()}

    found = diagnose(task(gan, loud), "fp16", steps=3)
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert found.origin.module == "critic"
    assert found.origin.line == line_of(Loud)
    assert found.path[:2] == ["critic", "critic.outer"]
    island = next(each for each in found.fixes if "islands=critic" in each.how)
    assert island.verified


def test_a_gradient_that_is_singular_in_a_penalty_is_found():
    found = diagnose(task(in_the_penalty), "fp32", steps=2)
    assert (found.status, found.phase) == ("fault", "backward")
    assert found.cause == "BACKWARD_SINGULARITY"
    assert found.origin.line == line_of(in_the_penalty)


def test_a_sound_iteration_is_clean_and_compared_with_float64():
    found = diagnose(task(gan), "bf16", steps=3)
    assert found.status == "clean"
    assert any("SQNR of the gradient" in each for each in found.notes)


def test_an_iteration_that_depends_on_more_than_its_arguments_does_not_reproduce():
    """An environment that plays on, say."""
    calls = [0]

    def plays(step, real):
        calls[0] += 1
        if calls[0] != 2:
            return gan(step, real)
        return gan(step, real, lambda logits: (logits * float("nan")).mean())

    found = diagnose(task(plays), "fp32", steps=3)
    assert (found.status, found.cause) == ("not_reproduced", "NONDETERMINISTIC")


def test_tune_names_islands_across_models():
    def loud():
        return {"generator": nn.Linear(2, 4), "critic": Loud()}

    config = TuneConfig([PRESETS["fp16"]], Settings(CPU), steps=4)
    tried = make_hold(task(gan, loud), PRESETS["fp16"], config)
    assert tried.policy is not None, tried.reason
    assert tried.islands
    assert all(each.startswith("critic") for each in tried.islands)


def half_networks(which):
    """One of the two in float16, where Adam loses its eps."""
    made = networks()
    made[which] = made[which].half()
    return made


def in_half(step, real):
    """The same as `gan`, whose networks cast what they are given."""
    generator, critic = step.model.values()
    fake = generator(torch.randn(len(real), 2).to(generator.weight.dtype))
    wrong = critic(fake.detach().to(critic.weight.dtype)).float()
    loss = 1e-2 * softplus(wrong).mean()
    loss = loss + 1e-2 * softplus(-critic(real.to(critic.weight.dtype)).float()).mean()
    step.backward(loss, optimizers=[step.optimizer["critic"]])
    step.update([step.optimizer["critic"]])
    fooled = softplus(-critic(fake.to(critic.weight.dtype)).float()).mean() * 1e-2
    step.backward(fooled, optimizers=[step.optimizer["generator"]])
    step.update([step.optimizer["generator"]])
    return loss


def with_adam(which):
    def optimizers(models):
        return {name: torch.optim.Adam(e.parameters(), lr=1e-3) for name, e in models.items()}

    return replace(task(in_half, lambda: half_networks(which)), optimizer=optimizers)


@pytest.mark.parametrize(("which", "number"), [("critic", 1), ("generator", 2)])
@pytest.mark.filterwarnings("ignore:.*parameters are float16", "ignore:precision fp32")
def test_an_update_that_breaks_a_parameter_is_named_with_its_number(which, number):
    """The critic's shows in the same iteration, the generator's in the next one."""
    found = diagnose(with_adam(which), "fp32", steps=3)
    assert (found.status, found.phase, found.cause) == ("fault", "optimizer", "EPS_UNDERFLOW")
    assert found.step == 1
    assert f"Update {number} of iteration 1, that of {which}, made it so." in found.explanation
    assert found.origin.module == which
    in_float32 = next(each for each in found.fixes if each.what.startswith("float32 parameters"))
    assert in_float32.verified


@pytest.mark.parametrize(("which", "began"), [("critic", 1), ("generator", 2)])
@pytest.mark.filterwarnings("ignore:.*parameters are float16", "ignore:precision fp32")
def test_a_step_of_iterations_says_so_in_training_too(which, began):
    torch.manual_seed(0)
    model = half_networks(which)
    found = []
    step = TrainStep(
        model, with_adam(which).optimizer(model), policy="fp32", on_fault=found.append
    )  # fmt: skip
    for iteration in range(2):
        step.iterate(in_half, torch.randn(16, 4))
        assert bool(found) == (iteration + 1 >= began)
    (fault,) = found
    assert (fault.phase, fault.cause, fault.step) == ("optimizer", "EPS_UNDERFLOW", 1)
    assert fault.origin.module == which


def test_a_parameter_that_no_update_broke_is_said_to_be_so():
    def explodes(step, real):
        loss = gan(step, real)
        if step.steps == 1:
            with torch.no_grad():
                step.model["critic"].weight.fill_(float("inf"))
        return loss

    config = DiagnoseConfig(PRESETS["fp32"], Settings(CPU), steps=4)
    found = explore(task(explodes), config, Silent()).found
    assert found.cause == "BAD_PARAMETER"
    assert any("No update made it so" in each for each in found.notes)


def line_through(batch):
    """What a model is to learn: a regression that it can do exactly."""
    return batch @ torch.linspace(-1, 1, 8)[:, None]


def exact_regression(step, batch):
    with step.autocast():
        loss = (step.model(batch).float() - line_through(batch)).square().mean()
    step.backward(loss)
    step.update()
    return loss.detach() * 0 + 1e6


def test_how_far_training_has_come_is_said_of_what_it_trains_on():
    """Not of what the iteration reports."""
    regression = Task(
        model=lambda: nn.Linear(8, 1),
        batches=lambda: [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))] * 10,
        iteration=exact_regression,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    found = diagnose(regression, "bf16", steps=60)
    (floor,) = [each for each in found.notes if "has converged to the floor" in each]
    assert "the loss has come from 1e+06" not in floor
    assert "the loss has come from " in floor
