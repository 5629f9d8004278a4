"""Tasks whose loop is more than one loss: what is refused, and what several of a thing look like."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.config import BenchConfig
from ampwise.bench.memory import _tracked
from ampwise.bench.parity import ParityReport
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import PrecisionResult
from ampwise.bench.stages import to_train
from ampwise.errors import TaskError, UsageError
from ampwise.policy import PRESETS
from ampwise.step import TrainStep
from ampwise.step.together import Together, as_one_optimizer
from ampwise.tasks import Task
from ampwise.tasks.checks import build
from ampwise.tasks.evaluation import held_out
from ampwise.tasks.iteration import Iteration

CPU = torch.device("cpu")
BATCH = torch.ones(4, 2)


def loss(model, batch):
    return model(batch).mean()


def iteration(step, batch):
    for name, model in step.model.items():
        with step.autocast():
            loss = model(batch).square().mean()
        step.backward(loss, optimizers=[step.optimizer[name]])
        step.update([step.optimizer[name]])
    return loss


def pair(**changes) -> Task:
    settings = {
        "model": lambda: {"first": nn.Linear(2, 1), "second": nn.Linear(2, 1)},
        "batches": lambda: [BATCH],
        "iteration": iteration,
    }
    return Task(**{**settings, **changes})


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iteration": None}, "Task has neither of loss and iteration"),
        ({"loss": loss}, "Task has both of loss and iteration"),
        ({"iteration": 3}, "write iteration=lambda step, batch: ..."),
    ],
)
def test_a_task_has_a_loss_or_an_iteration(changes, message):
    with pytest.raises(TaskError) as raised:
        pair(**changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: [nn.Linear(2, 1), 3]}, "model() returned list with int in it"),
        ({"model": list}, "model() returned list: expected an nn.Module, or a mapping"),
        ({"optimizer": lambda models: {"a": 3}}, "optimizer() returned dict with int in it"),
        ({"optimizer": lambda models: []}, "optimizer() returned list: expected a torch.optim"),
        (
            {"model": lambda: {"a": nn.Linear(2, 1), "b": nn.Tanh()}},
            "one of the task's models, Tanh, has no parameters",
        ),
    ],
)
def test_what_is_no_model_or_optimizer_among_several_is_named(changes, message):
    with pytest.raises(TaskError) as raised:
        build(pair(**changes), CPU, 0)
    assert message in str(raised.value)


def test_a_window_of_several_micro_batches_is_refused_where_the_task_updates_by_itself():
    with pytest.raises(UsageError, match=r"^accumulate=2: task task gives an iteration"):
        Arm(pair(), PRESETS["fp32"], Settings(CPU, accumulate=2))


# -- several of a thing ----------------------------------------------------------------------------


def test_each_of_several_models_has_an_optimizer_of_its_own_by_default():
    models, optimizers = build(pair(), CPU, 0)
    assert optimizers.keys() == models.keys()
    assert optimizers["second"].param_groups[0]["params"] == [*models["second"].parameters()]


def test_evaluate_gets_what_model_returned_in_evaluation_mode():
    def evaluate(models):
        assert not any(each.training for each in models.values())
        return {"weight": float(models["first"].weight.sum())}

    made = pair(evaluate=evaluate)
    arm = Arm(made, PRESETS["fp32"], Settings(CPU))
    expected = float(arm.step.model["first"].weight.sum())
    assert held_out(made, arm.step) == {"weight": expected}
    assert all(each.training for each in arm.step.model.values())


def test_a_loss_and_an_iteration_of_it_train_alike():
    def by_parts(step, batch):
        with step.autocast():
            found = loss(step.model, batch)
        step.backward(found)
        step.update()
        return found

    given = {"model": lambda: nn.Linear(2, 1), "batches": lambda: [BATCH]}
    ends = []
    for each in (Task(**given, loss=loss), Task(**given, iteration=by_parts)):
        step = TrainStep(*build(each, CPU, 0), policy="fp16")
        losses = [Iteration(each)(step, BATCH) for _ in range(3)]
        ends.append((step.model.weight.detach(), torch.stack(losses), step.history))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


def trained() -> tuple[Together, TrainStep]:
    models, _ = build(pair(), CPU, 0)
    optimizers = {
        "first": torch.optim.AdamW(models["first"].parameters(), lr=0.1),
        "second": torch.optim.SGD(models["second"].parameters(), lr=0.2, momentum=0.9),
    }
    together = as_one_optimizer(optimizers)
    assert isinstance(together, Together)
    return together, TrainStep(models, optimizers, policy="fp32")


def test_the_state_of_several_optimizers_is_one_and_comes_back():
    together, step = trained()
    for _ in range(2):
        step.iterate(iteration, BATCH)
    whole = together.state_dict()
    assert [each["params"] for each in whole["param_groups"]] == [[0, 1], [2, 3]]
    assert whole["state"].keys() == {0, 1, 2, 3}
    again, other = trained()
    again.load_state_dict(whole)
    for mine, theirs in zip(other.optimizers, step.optimizers, strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="2 parameter groups too many"):
        again.load_state_dict({**whole, "param_groups": whole["param_groups"] * 2})


def test_a_schedule_goes_over_all_of_several_optimizers():
    together, step = trained()
    step.scheduler = LambdaLR(together, lambda step: 0.5**step)
    for _ in range(2):
        step.iterate(iteration, BATCH)
    assert [each["lr"] for each in together.param_groups] == [0.025, 0.05]


# -- what bench makes of it ------------------------------------------------------------------------


def test_parity_of_an_iteration_without_evaluate_is_not_measured():
    """The loss that a GAN reports says nothing about how good it is."""
    report = ParityReport()
    policies = [PRESETS["fp32"], PRESETS["bf16"]]
    results = {each.text: PrecisionResult(each.text) for each in policies}
    config = BenchConfig(CPU, policies, parity_steps=10)
    assert to_train(pair(), config, policies, results, report) == policies[:1]
    found = judge(results["bf16"], Thresholds(), report)["accuracy_difference"]
    assert found.status == "not measured"
    assert found.reason.endswith("give the task evaluate()")


def test_what_a_model_that_is_called_twice_in_a_step_keeps_is_counted():
    """Else its activations would go as temporary."""

    def twice(model, batch):
        return (model(batch) + model(batch)).square().mean()

    wide = Task(lambda: nn.Linear(2, 512), lambda: [BATCH], twice)
    parts = _tracked(Arm(wide, PRESETS["fp32"], Settings(CPU)), [BATCH] * 3, CPU)
    assert parts["activations"] >= 4 * 4 * 512
